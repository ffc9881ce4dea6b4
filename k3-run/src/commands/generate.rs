//! Continues a prompt and prints what comes, as it comes.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context;
use k3_formats::Error;
use k3_formats::container::Container;
use k3_formats::tokenizer::{Specials, StreamDecoder, Tokenizer};

use crate::cli::{Act8, GenerateArgs, Print};
use crate::engine::{Cancelled, Engine};
use crate::open::{self, Sequences};
use crate::report::say;
use crate::sampler::{Sampler, SamplingParams};
use crate::session::{Session, SessionOptions, saved_tokens};
use crate::speculate::{DraftStats, Drafter, decode};

pub(super) fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    let start = Instant::now();
    let opening = open::TokenizerThread::start(&args.engine.container);
    let container = Container::open(&args.engine.container)?;
    // How long the prompt is decides how much room there must be.
    let tokenizer = opening.wait()?;
    let prompt = prompt_ids(args, &tokenizer)?;
    let loaded = args.session.load.as_deref().map(saved_tokens).transpose()?.unwrap_or(0);
    let room = loaded.saturating_add(prompt.len()).saturating_add(args.tokens);
    let engine_args = args.engine.with_context(room);
    let context = engine_args.context.unwrap_or(open::DEFAULT_CONTEXT);
    let options = match (args.session.speculate, &args.session.save) {
        (0, None) => SessionOptions::plain(context),
        (guesses, _) => SessionOptions::conversation(context, 0, None, guesses),
    };
    let layers = engine_args.layers.unwrap_or(usize::MAX).clamp(1, container.config.layers());
    let kept_bytes = options.kept_bytes(&container.config, layers);
    let sequences = Sequences { count: 1, kept_bytes };
    let mut engine = open::engine_for(&container, &engine_args, Act8::Experts, sequences)?;
    engine.prefetch(engine_args.usage_dir().as_deref());
    let mut session = Session::with_options(&engine, &options)?;
    let conversation = match &args.session.load {
        Some(path) => session.load(&engine, path)?,
        None => String::new(),
    };
    let sampling = args.sampling.params(SamplingParams::GREEDY);
    let unseeded = sampling.temperature > 0.0 && sampling.seed.is_none();
    let sampler = Sampler::new(sampling, container.config.vocab)?;
    let mut text = Text {
        tokens: [session.tokens(), &prompt].concat(),
        sampler,
        stop: open::stop_ids(&container, &tokenizer)?,
        writer: Writer::new(&tokenizer, args.print),
        left: args.tokens,
        context,
    };
    text.sampler.prompt(&text.tokens);
    let cancel = Arc::new(AtomicBool::new(false));
    if args.session.save.is_some() {
        stop_on_interrupt(&cancel).context("cannot listen for Ctrl-C")?;
    }
    let mut drafter = Drafter::new(args.session.speculate);
    let mut times = Times { ready: start.elapsed(), ..Times::default() };
    let given = text.tokens.len();
    let written = write(&mut text, &mut session, &mut engine, &mut drafter, &cancel, &mut times);
    text.writer.finish()?;
    let stopped = written.as_ref().is_err_and(|error| error.is::<Cancelled>());
    match &args.session.save {
        Some(path) if written.is_ok() || stopped && text.tokens.len() > given => {
            // The last token is not taken in yet; with it the text can go on by itself.
            if text.tokens.len() <= context {
                let cancel = AtomicBool::new(false);
                session.advance_to(&mut engine, &text.tokens, &[], &cancel, |_| {})?;
            }
            save(&session, &engine, path, &conversation)?;
        }
        _ => written?,
    }
    times.report(&engine, drafter.stats());
    if unseeded {
        say(format_args!("seed {}", text.sampler.seed()));
    }
    Ok(())
}

/// Takes the prompt in and writes what follows.
fn write(
    text: &mut Text<'_>,
    session: &mut Session,
    engine: &mut Engine<'_>,
    drafter: &mut Drafter,
    cancel: &AtomicBool,
    times: &mut Times,
) -> anyhow::Result<()> {
    let began = Instant::now();
    let advance = session.advance_to(engine, &text.tokens, &[], cancel, |_| {})?;
    (times.prompt, times.prefill) = (advance.total - advance.reused, began.elapsed());
    let began = Instant::now();
    let mut next = text.choose(session.logits())?;
    while let Some(id) = next {
        next = decode(session, engine, id, drafter, cancel, |logits| text.choose(logits))?;
        (times.decoded, times.decode) = (session.tokens().len() - advance.total, began.elapsed());
    }
    Ok(())
}

/// The first Ctrl-C sets `cancel`, so that what there is can be saved; the next one ends
/// the program.
fn stop_on_interrupt(cancel: &Arc<AtomicBool>) -> std::io::Result<()> {
    let signal = signal_hook::consts::SIGINT;
    signal_hook::flag::register_conditional_default(signal, Arc::clone(cancel))?;
    signal_hook::flag::register(signal, Arc::clone(cancel)).map(|_| ())
}

fn save(
    session: &Session,
    engine: &Engine<'_>,
    path: &Path,
    conversation: &str,
) -> anyhow::Result<()> {
    session.save(engine, path, conversation)?;
    say(format_args!("saved {} tokens to {}", session.tokens().len(), path.display()));
    Ok(())
}

/// What there is so far, and how it grows.
struct Text<'a> {
    /// What was loaded, the prompt, and all that was chosen.
    tokens: Vec<u32>,
    sampler: Sampler,
    stop: Vec<u32>,
    writer: Writer<'a>,
    /// Tokens that may still be chosen.
    left: usize,
    context: usize,
}

impl Text<'_> {
    /// Chooses a token and writes it; nothing is to follow after `None`.
    fn choose(&mut self, logits: &[f32]) -> anyhow::Result<Option<u32>> {
        let full = self.tokens.len() >= self.context;
        let id = self.sampler.sample(logits)?;
        self.tokens.push(id);
        if self.stop.contains(&id) {
            return Ok(None);
        }
        self.sampler.accept(id);
        self.writer.put(id)?;
        self.left -= 1;
        Ok((self.left > 0 && !full).then_some(id))
    }
}

fn prompt_ids(args: &GenerateArgs, tokenizer: &Tokenizer) -> anyhow::Result<Vec<u32>> {
    let ids = match (&args.prompt.prompt, &args.prompt.ids) {
        (_, Some(ids)) => ids.0.clone(),
        (Some(text), None) => tokenizer.encode(text, Specials::Recognize),
        (None, None) => Vec::new(),
    };
    if ids.is_empty() && args.session.load.is_none() {
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
    decoded: usize,
    decode: Duration,
}

impl Times {
    fn report(&self, engine: &Engine<'_>, drafts: DraftStats) {
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        say(format_args!(
            "ready in {:.0} ms, prompt {} tokens at {:.2}/s, {} more at {:.2}/s",
            self.ready.as_secs_f64() * 1e3,
            self.prompt,
            rate(self.prompt, self.prefill),
            self.decoded,
            rate(self.decoded, self.decode)
        ));
        let stats = engine.experts().stats();
        let asked = (stats.hits + stats.misses).max(1);
        say(format_args!(
            "experts: {:.1} % of {asked} from the cache, {:.3} GB read, waited {:.2} s",
            stats.hits as f64 * 100.0 / asked as f64,
            stats.bytes_read as f64 / 1e9,
            stats.waited.as_secs_f64()
        ));
        if drafts.guessed > 0 {
            say(format_args!(
                "guesses: {} of {} right in {} steps",
                drafts.right, drafts.guessed, drafts.steps
            ));
        }
    }
}
