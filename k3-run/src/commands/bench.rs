//! Measures this machine and what it makes of a model.

use std::io::Write;
use std::time::Duration;

use anyhow::Context;
use k3_formats::Error;
use k3_formats::container::Container;
use k3_formats::tokenizer::Specials;

use crate::bench::{Bench, BenchOptions};
use crate::cli::{Act8, BenchArgs};
use crate::open;

/// What is taken in and continued unless the user gives something else.
const TEXT: &str = "The harbour at low tide smelled of rope and iron. Three boats lay on the \
mud, and the ferryman walked from one to the next with a lamp, counting planks. When the water \
came back, he said, the middle one would float first, because its builder had measured twice. \
Nobody asked him how he knew. A child wrote the numbers 3, 14, 159 and 2653 on a slate and asked \
what came next; the ferryman laughed and pointed at the sea.";

pub(super) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let container = Container::open(&args.engine.container)?;
    let tokenizer = open::tokenizer(&container.dir)?;
    let text = match &args.text {
        Some(path) => fs_err::read_to_string(path)?,
        None => TEXT.to_owned(),
    };
    let ids = tokenizer.encode(&text, Specials::Text);
    if ids.is_empty() {
        let error = Error::missing("the text is empty").hint("give a file with words in it");
        return Err(error.into());
    }
    let longest = args.prompt.iter().copied().max().unwrap_or(0);
    let room = args.depth + longest.max(ids.len() + 1 + args.rounds * args.tokens);
    let engine_args = args.engine.with_context(room.max(open::DEFAULT_CONTEXT));
    let mut engine = open::engine(&container, &engine_args, Act8::Experts)?;
    let uncached = open::uncached_experts(&container, &engine_args)?;
    let options = BenchOptions {
        rounds: args.rounds,
        time: Duration::from_secs(args.seconds),
        tokens: args.tokens,
        prompts: args.prompt.clone(),
        depth: args.depth,
    };
    let mut bench = Bench::new(&mut engine, uncached, &container, &ids, options)?;
    let report = bench.run()?;
    if let Some(path) = &args.trace {
        let mut file = std::io::BufWriter::new(fs_err::File::create(path)?);
        bench.trace().write(&mut file).and_then(|()| file.flush()).with_context(|| {
            let path = path.display();
            format!("cannot write {path}")
        })?;
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
    } else {
        report.write(&mut out)?;
    }
    out.flush()?;
    Ok(())
}
