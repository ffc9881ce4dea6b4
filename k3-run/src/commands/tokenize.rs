//! Text to ids and back.

use std::io::{Read, Write};
use std::path::Path;

use anyhow::Context;
use k3_formats::Error;
use k3_formats::tokenizer::Specials;

use crate::chat;
use crate::cli::{DetokenizeArgs, TextArgs, TokenizeArgs};
use crate::open;

pub(super) fn tokenize(args: &TokenizeArgs) -> anyhow::Result<()> {
    let tokenizer = open::tokenizer(&args.container)?;
    let specials = if args.specials { Specials::Recognize } else { Specials::Text };
    let ids = match &args.source.chat {
        Some(path) => chat::encode_file(&tokenizer, path, chat::Defaults::PUBLISHED)?,
        None => tokenizer.encode(&read_text(&args.source)?, specials),
    };
    writeln!(std::io::stdout().lock(), "{}", serde_json::to_string(&ids)?)?;
    Ok(())
}

pub(super) fn detokenize(args: &DetokenizeArgs) -> anyhow::Result<()> {
    let tokenizer = open::tokenizer(&args.container)?;
    if let Some(id) = args.ids.0.iter().find(|&&id| tokenizer.token_bytes(id).is_none()) {
        let problem =
            format!("token id {id} is not in the vocabulary of {}", tokenizer.vocab_size());
        let hint = "ids are those that `k3-run tokenize` prints with this container";
        return Err(Error::mismatch(problem).hint(hint).into());
    }
    writeln!(std::io::stdout().lock(), "{}", tokenizer.decode(&args.ids.0))?;
    Ok(())
}

fn read_text(source: &TextArgs) -> anyhow::Result<String> {
    match (&source.text, &source.file) {
        (Some(text), _) => Ok(text.clone()),
        (None, Some(path)) if path == Path::new("-") => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context("cannot read text from stdin")?;
            Ok(text)
        }
        (None, Some(path)) => Ok(fs_err::read_to_string(path)?),
        (None, None) => Ok(String::new()),
    }
}
