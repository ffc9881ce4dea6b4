//! Continues a prompt and prints what comes, as it comes.

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use k3_formats::Error;
use k3_formats::container::Container;
use k3_formats::tokenizer::{Specials, StreamDecoder, Tokenizer};

use crate::cli::{Act8, GenerateArgs, Print};
use crate::engine::Engine;
use crate::open;
use crate::report::say;
use crate::sampler::{Sampler, SamplingParams};
use crate::session::Session;

pub(super) fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    let start = Instant::now();
    let container = Container::open(&args.engine.container)?;
    let tokenizer = open::tokenizer(&container.dir)?;
    let prompt = prompt_ids(args, &tokenizer)?;
    let options = args.engine.with_context(prompt.len() + args.tokens);
    let context = options.context.unwrap_or(open::DEFAULT_CONTEXT);
    let mut engine = open::engine(&container, &options, Act8::Experts)?;
    let mut sampler = Sampler::new(sampling(args), container.config.vocab)?;
    let mut writer = Writer::new(&tokenizer, args.print);
    let stop = open::stop_ids(&container, &tokenizer)?;
    let ready = start.elapsed();

    let mut session = Session::new(&engine, context);
    sampler.prompt(&prompt);
    let cancel = AtomicBool::new(false);
    let mut times = Times { ready, ..Times::default() };
    let mut next = prompt;
    let mut generated = 0;
    loop {
        let began = Instant::now();
        let taken = next.len();
        let logits = session.extend(&mut engine, &next, &cancel, |_| {})?;
        times.add(taken, began.elapsed());
        let id = sampler.sample(logits)?;
        if stop.contains(&id) {
            break;
        }
        sampler.accept(id);
        writer.put(id)?;
        generated += 1;
        if generated == args.tokens || session.tokens().len() == context {
            break;
        }
        next = vec![id];
    }
    writer.finish()?;
    times.report(&engine);
    if args.temperature > 0.0 && args.seed.is_none() {
        say(format_args!("seed {}", sampler.seed()));
    }
    Ok(())
}

fn sampling(args: &GenerateArgs) -> SamplingParams {
    SamplingParams {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        seed: args.seed,
        ..SamplingParams::PLAIN
    }
}

fn prompt_ids(args: &GenerateArgs, tokenizer: &Tokenizer) -> anyhow::Result<Vec<u32>> {
    let ids = match (&args.prompt.prompt, &args.prompt.ids) {
        (_, Some(ids)) => ids.0.clone(),
        (Some(text), None) => tokenizer.encode(text, Specials::Recognize),
        (None, None) => Vec::new(),
    };
    if ids.is_empty() {
        return Err(Error::missing("the prompt is empty")
            .hint("give some text with --prompt")
            .into());
    }
    Ok(ids)
}

/// Prints tokens, holding half characters back.
struct Writer<'a> {
    tokenizer: &'a Tokenizer,
    decoder: StreamDecoder,
    print: Print,
    out: std::io::Stdout,
}

impl<'a> Writer<'a> {
    fn new(tokenizer: &'a Tokenizer, print: Print) -> Self {
        Self { tokenizer, decoder: StreamDecoder::new(), print, out: std::io::stdout() }
    }

    fn put(&mut self, id: u32) -> std::io::Result<()> {
        match self.print {
            Print::Ids => writeln!(self.out, "{id}")?,
            Print::Text => {
                let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
                self.out.write_all(self.decoder.push(bytes).as_bytes())?;
            }
        }
        self.out.flush()
    }

    fn finish(&mut self) -> std::io::Result<()> {
        if self.print == Print::Text {
            writeln!(self.out, "{}", self.decoder.finish())?;
        }
        self.out.flush()
    }
}

/// Where the time went.
#[derive(Default)]
struct Times {
    ready: Duration,
    prompt: usize,
    prefill: Duration,
    steps: usize,
    decode: Duration,
}

impl Times {
    fn add(&mut self, tokens: usize, took: Duration) {
        if self.prompt == 0 {
            (self.prompt, self.prefill) = (tokens, took);
        } else {
            self.steps += tokens;
            self.decode += took;
        }
    }

    fn report(&self, engine: &Engine<'_>) {
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        say(format_args!(
            "ready in {:.0} ms, prompt {} tokens at {:.2}/s, {} more at {:.2}/s",
            self.ready.as_secs_f64() * 1e3,
            self.prompt,
            rate(self.prompt, self.prefill),
            self.steps,
            rate(self.steps, self.decode)
        ));
        let stats = engine.experts().stats();
        let asked = (stats.hits + stats.misses).max(1);
        say(format_args!(
            "experts: {:.1} % of {asked} from the cache, {:.3} GB read, waited {:.2} s",
            stats.hits as f64 * 100.0 / asked as f64,
            stats.bytes_read as f64 / 1e9,
            stats.waited.as_secs_f64()
        ));
    }
}
