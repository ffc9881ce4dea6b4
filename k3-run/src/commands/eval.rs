//! `k3-run eval`

use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use k3_formats::container::Container;
use k3_formats::container::manifest::MANIFEST_FILE;
use k3_formats::digest::Digest;
use k3_formats::tokenizer::{Specials, Tokenizer};
use k3_formats::{Error, text_file};
use serde_json::{Value, json};

use crate::cli::{Act8, EngineArgs, EvalArgs};
use crate::eval::{Estimate, Evaluation, Progress, Summary, Surprise, Window};
use crate::report::say;
use crate::state::KvType;
use crate::{memory, open};

/// Longest text that is read, in bytes.
const MAX_TEXT: u64 = 1 << 30;

/// Between two lines of talk.
const QUIET_FOR: Duration = Duration::from_secs(10);

pub(super) fn run(args: &EvalArgs) -> anyhow::Result<()> {
    let container = Container::open(&args.engine.container)?;
    let other = args.against.as_deref().map(Container::open).transpose()?;
    let tokenizer = open::tokenizer(&args.engine.container)?;
    let ids = ids(args, &tokenizer)?;
    if let Some(other) = &other
        && open::tokenizer(&other.dir)?.write_prepared() != tokenizer.write_prepared()
    {
        return Err(Error::mismatch("the other container has another tokenizer")
            .in_file(&other.dir)
            .hint("compare containers of one snapshot")
            .into());
    }
    let identity = identity(args, &ids)?;
    let (mut progress, mut windows) = match &args.progress {
        Some(path) => Progress::open(path, &identity)?,
        None => (Progress::none(), Vec::new()),
    };
    let mut log_probs = match &args.log_probs {
        Some(path) => Some(BufWriter::new(fs_err::File::create(path)?)),
        None => None,
    };
    let engine_args = memory_shares(args, other.is_some());
    let mut engine = open::engine(&container, &engine_args, Act8::Off)?;
    let reference = exact(&engine_args);
    let mut other_engine =
        other.as_ref().map(|other| open::engine(other, &reference, Act8::Off)).transpose()?;
    let mut evaluation =
        Evaluation { engine: &mut engine, other: other_engine.as_mut(), worst: args.worst };
    let all = ids.len().div_ceil(args.window);
    let mut said = Instant::now();
    for (number, ids) in ids.chunks(args.window).enumerate().skip(windows.len()) {
        let window = evaluation.window(ids, number * args.window, |loss| {
            if let Some(out) = &mut log_probs {
                out.write_all(&(-loss).to_le_bytes())?;
            }
            Ok(())
        })?;
        windows.push(progress.record(&window)?);
        if said.elapsed() > QUIET_FOR {
            said = Instant::now();
            let so_far = Summary::new(&windows, other.is_some(), 0).perplexity.value;
            say(format_args!("window {} of {all}, perplexity {so_far:.3} so far", number + 1));
        }
    }
    if let Some(mut out) = log_probs {
        out.flush()?;
    }
    print(args, &tokenizer, &ids, &windows)
}

/// The tokens of the text, as many as are wanted.
fn ids(args: &EvalArgs, tokenizer: &Tokenizer) -> anyhow::Result<Vec<u32>> {
    let text = text_file::read(&args.text, MAX_TEXT)?;
    let mut ids = tokenizer.encode(&text, Specials::Text);
    ids.truncate(args.tokens.unwrap_or(usize::MAX));
    if ids.len() < 2 {
        let problem = format!("expected a text of 2 tokens or more, found {}", ids.len());
        return Err(Error::mismatch(problem).in_file(&args.text).into());
    }
    // A lone token at the end predicts nothing.
    if ids.len() % args.window == 1 {
        ids.pop();
    }
    Ok(ids)
}

/// Two engines share one budget.
fn memory_shares(args: &EvalArgs, two: bool) -> EngineArgs {
    let mut engine = args.engine.with_context(args.window);
    if two {
        engine.ram = Some(engine.ram.unwrap_or_else(|| memory::spare().bytes()) / 2);
    }
    engine
}

/// The other container is always run without approximations, so that `--act8`,
/// `--kv-type` and `--top-p-experts` can be judged too.
fn exact(args: &EngineArgs) -> EngineArgs {
    let mut exact = args.clone();
    (exact.act8, exact.top_p_experts, exact.kv_type) = (Some(Act8::Off), None, KvType::F32);
    exact
}

/// What must be the same for an evaluation to go on.
fn identity(args: &EvalArgs, ids: &[u32]) -> anyhow::Result<Value> {
    let manifest = |dir: &Path| -> anyhow::Result<String> {
        Ok(Digest::of(&fs_err::read(dir.join(MANIFEST_FILE))?).to_string())
    };
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    Ok(json!({
        "container": manifest(&args.engine.container)?,
        "against": args.against.as_deref().map(manifest).transpose()?,
        "ids": Digest::of(&bytes).to_string(),
        "window": args.window,
        "worst": args.worst,
        "act8": format!("{:?}", args.engine.act8.unwrap_or(Act8::Off)),
        "top_p_experts": args.engine.top_p_experts,
        "kv_type": args.engine.kv_type.name(),
        "layers": args.engine.layers,
    }))
}

fn print(
    args: &EvalArgs,
    tokenizer: &Tokenizer,
    ids: &[u32],
    windows: &[Window],
) -> anyhow::Result<()> {
    let summary = Summary::new(windows, args.against.is_some(), args.worst);
    let text = |ids: &[u32]| tokenizer.decode(ids);
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut json = serde_json::to_value(&summary)?;
        if let Some(worst) = json["worst"].as_array_mut() {
            for (json, surprise) in worst.iter_mut().zip(&summary.worst) {
                json["text"] = text(&[surprise.token]).into();
                json["before"] = text(before(ids, surprise)).into();
            }
        }
        serde_json::to_writer_pretty(&mut out, &json)?;
        writeln!(out)?;
        return Ok(());
    }
    let between = |e: Estimate, digits: usize| match e.interval {
        Some((low, high)) => format!("{:.digits$}  ({low:.digits$} to {high:.digits$})", e.value),
        None => format!("{:.digits$}", e.value),
    };
    writeln!(out, "tokens          {} in {} windows", summary.tokens, summary.windows)?;
    writeln!(out, "perplexity      {}", between(summary.perplexity, 3))?;
    if let Some(against) = &summary.against {
        writeln!(out, "  of the other  {}", between(against.perplexity, 3))?;
        writeln!(out, "  ratio         {}", between(against.ratio, 5))?;
        writeln!(out, "KL, nats        {}", between(against.kl, 5))?;
        writeln!(out, "same top token  {}", between(against.same_top, 4))?;
    }
    for surprise in &summary.worst {
        let (token, top) = (text(&[surprise.token]), text(&[surprise.top]));
        let before = text(before(ids, surprise));
        match &surprise.against {
            Some(against) => writeln!(
                out,
                "  KL {:.3} at {}: {before:?} then {token:?}; top {top:?}, of the other {:?}",
                against.kl,
                surprise.at,
                text(&[against.top])
            )?,
            None => writeln!(
                out,
                "  loss {:.3} at {}: {before:?} then {token:?}; top {top:?}",
                surprise.loss, surprise.at
            )?,
        }
    }
    Ok(())
}

/// A few tokens before a surprising one.
fn before<'i>(ids: &'i [u32], surprise: &Surprise) -> &'i [u32] {
    &ids[surprise.at.saturating_sub(8)..surprise.at]
}
