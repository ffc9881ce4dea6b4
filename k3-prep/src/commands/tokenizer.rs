//! `k3-prep tokenizer`

use anyhow::Result;
use k3_formats::container::writer::write_file;
use k3_formats::snapshot::{Snapshot, weights_dir};
use k3_formats::tokenizer::Tokenizer;

use crate::Outcome;
use crate::cli::TokenizerArgs;
use crate::output;
use crate::tokenizer_check::check_with_tiktoken;
use crate::tokenizer_json::tokenizer_json;

pub(super) fn run(args: &TokenizerArgs) -> Result<Outcome> {
    let dir = weights_dir(&args.snapshot)?;
    let config = Snapshot::config_of(&args.snapshot)?;
    let model = dir.join("tiktoken.model");
    let tokenizer = Tokenizer::from_snapshot_files(
        &model,
        &dir.join("tokenizer_config.json"),
        config.base_vocab(),
    )?;
    check_with_tiktoken(&tokenizer).map_err(|e| e.in_file(&model))?;
    let json = tokenizer_json(&tokenizer);
    match &args.output {
        Some(path) => {
            write_file(path, &json)?;
            output::say(format_args!(
                "{}: {} tokens, {} of them special",
                path.display(),
                tokenizer.vocab_size(),
                tokenizer.vocab_size() - tokenizer.base_vocab()
            ));
        }
        None => output::result(|out| out.write_all(&json))?,
    }
    Ok(Outcome::Good)
}
