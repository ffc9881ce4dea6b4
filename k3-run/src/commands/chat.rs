//! Talks in the terminal.

use std::path::PathBuf;

use k3_formats::container::Container;

use crate::chat::Effort;
use crate::cli::{Act8, ChatArgs, EffortWord};
use crate::open::{self, DEFAULT_CONTEXT, Sequences};
use crate::repl::{ChatOptions, Conversation, Repl};
use crate::sampler::SamplingParams;
use crate::session::{Session, SessionOptions};

pub(super) fn run(args: &ChatArgs) -> anyhow::Result<()> {
    let opening = open::TokenizerThread::start(&args.engine.container);
    let container = Container::open(&args.engine.container)?;
    let context = args.engine.context.unwrap_or(DEFAULT_CONTEXT).min(container.config.max_context);
    let session = SessionOptions::conversation(
        context,
        args.checkpoints,
        args.checkpoint_dir.clone(),
        args.session.speculate,
    );
    let layers = args.engine.layers.unwrap_or(usize::MAX).clamp(1, container.config.layers());
    let kept_bytes = session.kept_bytes(&container.config, layers);
    let sequences = Sequences { count: 1, kept_bytes };
    let mut engine = open::engine_for(&container, &args.engine, Act8::Experts, sequences)?;
    // While the first line is being typed.
    engine.prefetch(args.engine.usage_dir().as_deref());
    let tokenizer = opening.wait()?;
    let stop_ids = open::stop_ids(&container, &tokenizer)?;
    let session = Session::with_options(&engine, &session)?;
    let effort = match args.effort {
        EffortWord::Low => Some(Effort::Low),
        EffortWord::High => Some(Effort::High),
        EffortWord::Max => Some(Effort::Max),
        EffortWord::None => None,
    };
    let conversation = Conversation::new(args.system.clone(), args.thinking(), effort);
    let options = ChatOptions {
        sampling: args.sampling.params(SamplingParams::RECOMMENDED),
        max_tokens: args.tokens,
        speculate: args.session.speculate,
        show_reasoning: !args.hide_reasoning,
        history: if args.no_history { None } else { args.history.clone().or_else(history_file) },
        load: args.session.load.clone(),
        save: args.session.save.clone(),
    };
    Repl::new(engine, tokenizer, stop_ids, session, conversation, options)?.run()
}

/// Where typed lines are kept unless told otherwise.
fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let state = state.or_else(|| Some(std::env::home_dir()?.join(".local/state")))?;
    Some(state.join("k3-run/history"))
}
