//! What the engine thread has to say about a request, until its response takes it.
//!
//! The engine thread never waits for a client: what a slow reader has not taken yet stays
//! here. That is bounded, since it is at most one reply, whose length the request and the
//! context bound. A reader that goes away is seen at once.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use super::error::ApiError;
use super::generation::Finish;
use super::queue::Queue;
use crate::chat::Event;
use crate::sampler::TokenLogprob;

/// Something about a reply.
#[derive(Debug)]
pub(super) enum Update {
    /// More of the reply.
    Event(Event),
    /// Log-probabilities of a token of the answer; its text may come later.
    Logprob(Logprob),
    /// The reply is complete.
    Finish(Finish),
    /// There will be no more of it.
    Failed(ApiError),
}

/// A token of the answer, its log-probability, and the most probable ones in its place.
#[derive(Debug)]
pub(super) struct Logprob {
    pub(super) token: TokenLogprob,
    pub(super) top: Vec<TokenLogprob>,
}

/// How far a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// So many others come first.
    Queued(usize),
    /// Tokens of the prompt taken in, and all of them.
    Prefill(usize, usize),
    /// Tokens of the reply.
    Decode(usize),
}

#[derive(Debug, Default)]
pub(super) struct Mailbox {
    inner: Mutex<Inner>,
    gone: AtomicBool,
    progress: [AtomicUsize; 3],
}

#[derive(Debug, Default)]
struct Inner {
    updates: Vec<Update>,
    /// Nothing more will come.
    closed: bool,
    waker: Option<Waker>,
}

impl Mailbox {
    /// Whether nobody waits for the reply any more.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    pub(super) fn set_progress(&self, progress: Progress) {
        let values = match progress {
            Progress::Queued(ahead) => [0, ahead, 0],
            Progress::Prefill(done, total) => [1, done, total],
            Progress::Decode(tokens) => [2, tokens, 0],
        };
        for (place, value) in self.progress.iter().zip(values) {
            place.store(value, Ordering::Relaxed);
        }
    }

    fn progress(&self) -> Progress {
        let [phase, a, b] = self.progress.each_ref().map(|v| v.load(Ordering::Relaxed));
        match phase {
            0 => Progress::Queued(a),
            1 => Progress::Prefill(a, b),
            _ => Progress::Decode(a),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Inner)) {
        let waker = {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut inner);
            inner.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The engine thread's end.
#[derive(Debug)]
pub(super) struct Sender(Arc<Mailbox>);

impl Sender {
    /// Adds all of `updates`.
    pub(super) fn send(&self, updates: &mut Vec<Update>) {
        self.0.change(|inner| inner.updates.append(updates));
    }

    /// Ends the reply before its time.
    pub(super) fn fail(self, error: ApiError) {
        self.0.change(|inner| inner.updates.push(Update::Failed(error)));
    }

    pub(super) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.0
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.0.change(|inner| inner.closed = true);
    }
}

/// The response's end. When it is dropped, the request is cancelled.
#[derive(Debug)]
pub(super) struct Reader {
    mailbox: Arc<Mailbox>,
    queue: Arc<Queue>,
}

impl Reader {
    /// All updates since the last call, at least one; `None` when there will be no more.
    pub(super) fn poll_take(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<Update>>> {
        let mut inner = self.mailbox.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if !inner.updates.is_empty() {
            return Poll::Ready(Some(std::mem::take(&mut inner.updates)));
        }
        if inner.closed {
            return Poll::Ready(None);
        }
        inner.waker = Some(context.waker().clone());
        Poll::Pending
    }

    pub(super) fn progress(&self) -> Progress {
        self.mailbox.progress()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.mailbox.gone.store(true, Ordering::Release);
        self.queue.reader_left();
    }
}

/// Both ends of a new mailbox; `queue` hears when the reader leaves.
pub(super) fn mailbox(queue: &Arc<Queue>) -> (Sender, Reader) {
    let mailbox = Arc::<Mailbox>::default();
    (Sender(mailbox.clone()), Reader { mailbox, queue: queue.clone() })
}
