//! The engine thread: several conversations side by side, one step of the model for all.
//!
//! A step holds one row of every slot that writes and a chunk of one slot that reads its
//! prompt, the one that came first. So dense weights are read once for all rows, an expert
//! that several rows use is read once, and a long prompt does not keep the others waiting
//! for longer than a chunk. Every row's result is what it would be alone.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Instant;

use k3_formats::tokenizer::Tokenizer;

use super::error::ApiError;
use super::generation::{Finish, FinishReason};
use super::mailbox::{Progress, Update};
use super::queue::{Job, Order, Queue};
use super::stats::Stats;
use crate::engine::{Cancelled, Engine, Want};
use crate::report::say;
use crate::session::{Part, Session, SessionOptions, step};

/// All slots and the engine that serves them.
pub(super) struct Slots<'e, 'a> {
    engine: &'e mut Engine<'a>,
    tokenizer: &'e Tokenizer,
    queue: &'e Queue,
    stats: &'e Stats,
    slots: Vec<Slot>,
}

struct Slot {
    session: Session,
    active: Option<Active>,
    /// Number of the last job, to tell which slot has been idle longest.
    last: u64,
}

/// A job in a slot.
struct Active {
    job: Job,
    phase: Phase,
    cached: usize,
    began: Instant,
    updates: Vec<Update>,
}

enum Phase {
    /// The prompt is being taken in, up to here; checkpoints are due at `stops`.
    Prefill { done: usize, stops: Vec<usize> },
    /// This token comes next.
    Decode { next: u32 },
}

impl<'e, 'a> Slots<'e, 'a> {
    /// `count` empty slots.
    ///
    /// # Errors
    /// See [`Session::with_options`].
    pub(super) fn new(
        engine: &'e mut Engine<'a>,
        tokenizer: &'e Tokenizer,
        (queue, stats): (&'e Queue, &'e Stats),
        count: usize,
        options: &SessionOptions,
    ) -> anyhow::Result<Self> {
        let slot = |_| {
            let session = Session::with_options(engine, options)?;
            Ok(Slot { session, active: None, last: 0 })
        };
        let slots = (0..count).map(slot).collect::<anyhow::Result<_>>()?;
        Ok(Self { engine, tokenizer, queue, stats, slots })
    }

    /// Takes up the conversations that [`Self::save`] left in `dir`. What does not fit is
    /// left out and said.
    pub(super) fn load(&mut self, dir: &Path) {
        for (i, slot) in self.slots.iter_mut().enumerate() {
            let path = slot_path(dir, i);
            if path.is_file()
                && let Err(error) = slot.session.load(self.engine, &path)
            {
                say(format_args!("note: a slot starts empty: {error}"));
                slot.session.reset();
            }
        }
    }

    /// Leaves the conversations of all slots in `dir`.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(super) fn save(&mut self, dir: &Path) -> anyhow::Result<()> {
        fs_err::create_dir_all(dir)?;
        for (i, slot) in self.slots.iter_mut().enumerate() {
            if slot.session.tokens().is_empty() {
                continue;
            }
            slot.session.save(self.engine, &slot_path(dir, i), "")?;
        }
        Ok(())
    }

    /// Serves until the queue is told to end.
    pub(super) fn run(&mut self) {
        loop {
            let order = self.admit();
            if order == Order::Stop {
                self.fail_all(|_| true, &ApiError::stopping());
                return;
            }
            self.drop_gone();
            if self.active() > 0 {
                self.step();
            } else if order == Order::Finish {
                return;
            }
        }
    }

    fn active(&self) -> usize {
        self.slots.iter().filter(|slot| slot.active.is_some()).count()
    }

    /// Gives waiting jobs to free slots.
    fn admit(&mut self) -> Order {
        loop {
            let active = self.active();
            self.stats.set_queue(self.queue.waiting(), active);
            if active == self.slots.len() {
                return self.queue.order();
            }
            match self.queue.take(active == 0) {
                (Order::Work, Some(job)) => self.start(job),
                (order, _) => return order,
            }
        }
    }

    /// Gives the job to the free slot that has most of its prompt already, of several to
    /// the one that has been idle longest.
    fn start(&mut self, job: Job) {
        let free = self.slots.iter_mut().filter(|slot| slot.active.is_none());
        let best = free
            .max_by_key(|slot| (slot.session.reusable(&job.prompt), std::cmp::Reverse(slot.last)));
        let Some(slot) = best else {
            return job.reply.fail(ApiError::internal());
        };
        slot.last = job.number;
        let cached = match slot.session.rewind_to(self.engine, &job.prompt) {
            Ok(cached) => cached,
            Err(error) => {
                say(format_args!("request {}: {error:#}", job.number));
                return job.reply.fail(ApiError::internal());
            }
        };
        self.stats.add_prompt(job.prompt.len(), cached);
        let total = job.prompt.len();
        let stops = slot.session.stops(cached, total, &job.turns);
        job.reply.mailbox().set_progress(Progress::Prefill(cached, total));
        let phase = Phase::Prefill { done: cached, stops };
        let mut active = Active { job, phase, cached, began: Instant::now(), updates: Vec::new() };
        if cached < total || active.take(self.tokenizer, slot.session.logits(), self.stats) {
            slot.active = Some(active);
        }
    }

    /// Frees the slots whose client has left.
    fn drop_gone(&mut self) {
        for slot in &mut self.slots {
            if let Some(active) = slot.active.take_if(|active| active.job.is_gone()) {
                self.stats.cancelled.fetch_add(1, Ordering::Relaxed);
                active.log("cancelled");
            }
        }
    }

    fn fail_all(&mut self, which: impl Fn(usize) -> bool, error: &ApiError) {
        for (i, slot) in self.slots.iter_mut().enumerate() {
            if which(i)
                && let Some(active) = slot.active.take()
            {
                active.log("failed");
                self.stats.failed.fetch_add(1, Ordering::Relaxed);
                active.job.reply.fail(error.clone());
            }
        }
    }

    /// The slot that takes its prompt in next: the one that came first.
    fn reader(&self) -> Option<usize> {
        let reading = |slot: &Slot| match &slot.active {
            Some(Active { job, phase: Phase::Prefill { .. }, .. }) => Some(job.number),
            _ => None,
        };
        let readers = self.slots.iter().enumerate();
        readers.filter_map(|(i, s)| Some((reading(s)?, i))).min().map(|(_, i)| i)
    }

    /// One step of the model.
    fn step(&mut self) {
        let reader = self.reader();
        let writes = |slot: &&Slot| {
            slot.active.as_ref().is_some_and(|a| matches!(a.phase, Phase::Decode { .. }))
        };
        let writers = self.slots.iter().filter(writes).count();
        let room = self.engine.max_rows().saturating_sub(writers).max(1);
        let mut parts = Vec::new();
        let mut members = Vec::new();
        for (i, slot) in self.slots.iter_mut().enumerate() {
            let Slot { session, active: Some(Active { job, phase, .. }), .. } = slot else {
                continue;
            };
            let (ids, want) = match phase {
                Phase::Decode { next } => (std::slice::from_ref(&*next), Want::Last),
                Phase::Prefill { done, stops } if reader == Some(i) => {
                    if stops.contains(done) {
                        session.checkpoint();
                    }
                    let total = job.prompt.len();
                    let stop = stops.iter().copied().find(|stop| stop > done).unwrap_or(total);
                    let to = stop.min(*done + room);
                    let want = if to == total { Want::Last } else { Want::None };
                    (&job.prompt[*done..to], want)
                }
                Phase::Prefill { .. } => continue,
            };
            members.push((i, ids.len(), want, job.reply.mailbox().clone()));
            parts.push(Part { session, ids, want });
        }
        let began = Instant::now();
        let cancel =
            self.queue.begin_step(members.iter().map(|(.., mailbox)| mailbox.clone()).collect());
        let stepped = step(self.engine, &mut parts, cancel).map(|_| ());
        drop(parts);
        self.queue.end_step();
        if let Err(error) = stepped {
            // Those who wanted it given up are dropped before the next step.
            if !error.is::<Cancelled>() {
                say(format_args!("step failed: {error:#}"));
                let failed = |i| members.iter().any(|m| m.0 == i);
                self.fail_all(failed, &ApiError::step_failed(&error));
            }
            return;
        }
        let read = members.iter().map(|m| m.1).sum::<usize>() - writers;
        self.stats.add_step(writers, read, began.elapsed());
        self.stats.set_engine(self.engine);
        let mut logits = self.engine.logits().chunks_exact(self.tokenizer.vocab_size());
        for (i, rows, want, _) in members {
            let logits = if want == Want::Last { logits.next() } else { None };
            self.slots[i].stepped(rows, logits, self.tokenizer, self.stats);
        }
    }
}

fn slot_path(dir: &Path, slot: usize) -> PathBuf {
    dir.join(format!("slot-{slot}.k3s"))
}

impl Slot {
    /// `rows` tokens were taken in; `logits: [vocab]` came after the last one if they were
    /// wanted.
    fn stepped(
        &mut self,
        rows: usize,
        logits: Option<&[f32]>,
        tokenizer: &Tokenizer,
        stats: &Stats,
    ) {
        let Some(active) = &mut self.active else { return };
        if let Phase::Prefill { done, .. } = &mut active.phase {
            *done += rows;
            let progress = Progress::Prefill(*done, active.job.prompt.len());
            active.job.reply.mailbox().set_progress(progress);
            if let Some(logits) = logits {
                self.session.end_prompt(logits);
            }
        }
        if let Some(logits) = logits
            && !active.take(tokenizer, logits, stats)
        {
            self.active = None;
        }
    }
}

impl Active {
    /// Takes the next token from its logits; false if the reply is over.
    fn take(&mut self, tokenizer: &Tokenizer, logits: &[f32], stats: &Stats) -> bool {
        let reason = match self.job.generation.next(tokenizer, logits, &mut self.updates) {
            Ok((next, reason)) => {
                self.phase = Phase::Decode { next };
                reason
            }
            Err(error) => {
                say(format_args!("request {}: {error}", self.job.number));
                self.updates.push(Update::Failed(ApiError::internal()));
                self.job.reply.send(&mut self.updates);
                stats.failed.fetch_add(1, Ordering::Relaxed);
                return false;
            }
        };
        let tokens = self.job.generation.tokens();
        self.job.reply.mailbox().set_progress(Progress::Decode(tokens));
        if let Some(reason) = reason {
            let finish = self.finish(reason);
            self.updates.push(Update::Finish(finish));
            stats.add_reply(finish.completion_tokens, self.began.elapsed());
            self.log(reason.as_str());
        }
        self.job.reply.send(&mut self.updates);
        reason.is_none()
    }

    fn finish(&self, reason: FinishReason) -> Finish {
        Finish {
            reason,
            prompt_tokens: self.job.prompt.len(),
            cached_tokens: self.cached,
            completion_tokens: self.job.generation.tokens(),
            reasoning_tokens: self.job.generation.reasoning_tokens(),
        }
    }

    fn log(&self, outcome: &str) {
        let Finish { prompt_tokens, cached_tokens, completion_tokens, .. } =
            self.finish(FinishReason::Stop);
        say(format_args!(
            "request {}: {outcome}, prompt {prompt_tokens} tokens ({cached_tokens} reused), \
             reply {completion_tokens}, {:.1} s",
            self.job.number,
            self.began.elapsed().as_secs_f64()
        ));
    }
}
