//! Requests on their way to the engine thread, and the ways to stop it.
//!
//! A request whose client has left is dropped wherever it is: in the queue at once, in a
//! slot at the end of the step. The step itself is given up, between two layers, only when
//! every request in it is gone: giving up a step costs all of them its rows, and a client
//! that stays must not pay for one that leaves.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::error::ApiError;
use super::generation::Generation;
use super::mailbox::{Mailbox, Progress, Sender};

/// A request that the engine thread can work on.
#[derive(Debug)]
pub(super) struct Job {
    /// Its number in the log.
    pub(super) number: u64,
    pub(super) prompt: Vec<u32>,
    /// Positions in the prompt at which messages begin.
    pub(super) turns: Vec<usize>,
    pub(super) generation: Generation,
    pub(super) reply: Sender,
}

impl Job {
    fn mailbox(&self) -> &Arc<Mailbox> {
        self.reply.mailbox()
    }

    /// Whether nobody waits for it any more.
    pub(super) fn is_gone(&self) -> bool {
        self.mailbox().is_gone()
    }
}

/// Why a job was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// As many wait as may.
    Full,
    /// The server is about to end.
    Closed,
}

/// What the engine thread has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Go on.
    Work,
    /// Finish what is in the slots, then end.
    Finish,
    /// End now.
    Stop,
}

/// The bounded queue.
#[derive(Debug)]
pub(super) struct Queue {
    limit: usize,
    inner: Mutex<Inner>,
    changed: Condvar,
    /// Gives the running step up.
    cancel: AtomicBool,
}

#[derive(Debug)]
struct Inner {
    waiting: VecDeque<Job>,
    order: Order,
    /// Requests in the running step.
    in_step: Vec<Arc<Mailbox>>,
}

impl Queue {
    pub(super) fn new(limit: usize) -> Self {
        let inner = Inner { waiting: VecDeque::new(), order: Order::Work, in_step: Vec::new() };
        Self {
            limit,
            inner: Mutex::new(inner),
            changed: Condvar::new(),
            cancel: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a job at the end.
    pub(super) fn push(&self, job: Job) -> Result<(), Refused> {
        let mut inner = self.lock();
        if inner.order != Order::Work {
            return Err(Refused::Closed);
        }
        inner.tidy();
        if inner.waiting.len() >= self.limit {
            return Err(Refused::Full);
        }
        inner.waiting.push_back(job);
        inner.tidy();
        self.changed.notify_one();
        Ok(())
    }

    /// The next job. With nothing else to do (`idle`) it waits for one, or for another order.
    pub(super) fn take(&self, idle: bool) -> (Order, Option<Job>) {
        let mut inner = self.lock();
        loop {
            inner.tidy();
            if inner.order == Order::Work
                && let Some(job) = inner.waiting.pop_front()
            {
                inner.tidy();
                return (Order::Work, Some(job));
            }
            if !idle || inner.order != Order::Work {
                return (inner.order, None);
            }
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Jobs that wait.
    pub(super) fn waiting(&self) -> usize {
        self.lock().waiting.len()
    }

    /// What the engine thread is to do.
    pub(super) fn order(&self) -> Order {
        self.lock().order
    }

    /// Takes no more jobs; those that wait are refused. `Stop` also gives the step up.
    pub(super) fn end(&self, order: Order) {
        let waiting = {
            let mut inner = self.lock();
            inner.order = order;
            if order == Order::Stop {
                self.cancel.store(true, Ordering::Relaxed);
            }
            self.changed.notify_one();
            std::mem::take(&mut inner.waiting)
        };
        for job in waiting {
            job.reply.fail(ApiError::stopping());
        }
    }

    /// A step for these requests begins. Returns the flag that gives it up.
    pub(super) fn begin_step(&self, requests: Vec<Arc<Mailbox>>) -> &AtomicBool {
        let mut inner = self.lock();
        inner.in_step = requests;
        self.set_cancel(&inner);
        &self.cancel
    }

    /// The step is over.
    pub(super) fn end_step(&self) {
        self.lock().in_step.clear();
    }

    /// Some reader has left.
    pub(super) fn reader_left(&self) {
        let mut inner = self.lock();
        inner.tidy();
        self.set_cancel(&inner);
    }

    fn set_cancel(&self, inner: &Inner) {
        let gone = !inner.in_step.is_empty() && inner.in_step.iter().all(|m| m.is_gone());
        self.cancel.store(gone || inner.order == Order::Stop, Ordering::Relaxed);
    }
}

impl Inner {
    /// Drops jobs whose reader has left and tells the others their place.
    fn tidy(&mut self) {
        self.waiting.retain(|job| !job.is_gone());
        for (ahead, job) in self.waiting.iter().enumerate() {
            job.mailbox().set_progress(Progress::Queued(ahead));
        }
    }
}
