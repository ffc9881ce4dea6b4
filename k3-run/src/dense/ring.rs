//! The order of reads: which entry a reader takes next, and which piece the computation
//! gets next. Only bookkeeping, no memory and no I/O.
//!
//! The script lists every piece and every kept matrix in execution order. Readers walk
//! it again and again, one pass for each step, as far ahead as there are buffers; kept
//! matrices are read in the first pass only. The head is read only in steps that want
//! it, which is known when the step begins.

use std::collections::VecDeque;

/// What the readers find in the script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Read once, and kept from then on.
    Kept,
    /// Read in every step.
    Streamed,
    /// Read in every step that gives logits.
    Head,
}

/// Work for a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Read this entry into its own memory, for the step with this number.
    Keep(usize, u64),
    /// Read this entry into a buffer of the ring, and hand it in under this ticket.
    Read(usize, Ticket),
    /// Nothing to do before something changes.
    Wait,
}

/// Identifies a read: a reset makes older ones worthless.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket {
    epoch: u64,
    number: u64,
}

#[derive(Debug)]
struct Flight<T> {
    entry: usize,
    landed: Option<T>,
}

/// The state of all reads; `T` is what a reader hands in.
#[derive(Debug)]
pub(super) struct Ring<T> {
    script: Vec<Kind>,
    /// Kept entries that readers have taken on.
    settled: Vec<bool>,
    /// Kept entries that could not be read in this step, and those to read once more.
    failed: Vec<usize>,
    again: Vec<usize>,
    cursor: usize,
    /// The pass the cursor is in, and the steps begun so far: pass n serves step n.
    pass: u64,
    step: u64,
    want_head: bool,
    /// Whether the last step used everything it was given.
    complete: bool,
    epoch: u64,
    /// Tickets given to the computation so far; the window starts there.
    taken: u64,
    window: VecDeque<Flight<T>>,
}

impl<T> Ring<T> {
    pub(super) fn new(script: Vec<Kind>) -> Self {
        Self {
            settled: vec![false; script.len()],
            failed: Vec::new(),
            again: Vec::new(),
            script,
            cursor: 0,
            pass: 1,
            step: 0,
            want_head: false,
            complete: true,
            epoch: 0,
            taken: 0,
            window: VecDeque::new(),
        }
    }

    /// Begins a step. After one that was given up, reads start over; what had landed for
    /// it is returned.
    pub(super) fn begin_step(&mut self, want_head: bool) -> Vec<T> {
        let mut unused = Vec::new();
        if !self.complete {
            self.taken += self.window.len() as u64;
            unused.extend(self.window.drain(..).filter_map(|flight| flight.landed));
            self.epoch += 1;
            (self.cursor, self.pass) = (0, self.step + 1);
        }
        self.again.append(&mut self.failed);
        self.step += 1;
        (self.want_head, self.complete) = (want_head, false);
        unused
    }

    /// Ends a step that went through.
    pub(super) fn end_step(&mut self) {
        self.complete = true;
    }

    /// The next entry to read; `free` tells whether the ring has a buffer for it.
    pub(super) fn next(&mut self, free: bool) -> Next {
        if let Some(entry) = self.again.pop() {
            return Next::Keep(entry, self.step);
        }
        // Once around is enough to know that there is nothing to do.
        for _ in 0..=self.script.len() {
            if self.cursor == self.script.len() {
                (self.cursor, self.pass) = (0, self.pass + 1);
            }
            let entry = self.cursor;
            let Some(&kind) = self.script.get(entry) else { return Next::Wait };
            match kind {
                Kind::Kept if self.settled[entry] => {}
                Kind::Kept => {
                    self.settled[entry] = true;
                    self.cursor += 1;
                    return Next::Keep(entry, self.step);
                }
                Kind::Head if self.step == self.pass && !self.want_head => {}
                Kind::Head if self.step > self.pass => {}
                Kind::Head if self.step < self.pass => return Next::Wait,
                // One step ahead at most, however small the model.
                Kind::Streamed | Kind::Head if self.pass > self.step + 1 || !free => {
                    return Next::Wait;
                }
                Kind::Streamed | Kind::Head => {
                    self.cursor += 1;
                    let number = self.taken + self.window.len() as u64;
                    self.window.push_back(Flight { entry, landed: None });
                    return Next::Read(entry, Ticket { epoch: self.epoch, number });
                }
            }
            self.cursor += 1;
        }
        Next::Wait
    }

    /// Hands in what was read; gives it back if nobody wants it any more.
    pub(super) fn land(&mut self, ticket: Ticket, read: T) -> Option<T> {
        if ticket.epoch != self.epoch {
            return Some(read);
        }
        self.window[(ticket.number - self.taken) as usize].landed = Some(read);
        None
    }

    /// A kept entry could not be read for `step`. Tells whether that fails the present
    /// step; if not it is read once more. The next step tries again in any case.
    pub(super) fn keep_failed(&mut self, entry: usize, step: u64) -> bool {
        let present = step == self.step;
        if present {
            self.failed.push(entry)
        } else {
            self.again.push(entry)
        }
        present
    }

    /// The next piece for the computation, if it has landed.
    ///
    /// # Panics
    /// The computation asks for another piece than the script has next.
    pub(super) fn take(&mut self, entry: usize) -> Option<T> {
        let front = self.window.front_mut()?;
        assert_eq!(front.entry, entry, "weights are used in the order of the script");
        let landed = front.landed.take()?;
        self.window.pop_front();
        self.taken += 1;
        Some(landed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Kind::{Head, Kept, Streamed};

    /// Takes all reads there are with `free` buffers, and lands them.
    fn fill(ring: &mut Ring<usize>, mut free: usize) -> Vec<usize> {
        let mut read = Vec::new();
        loop {
            match ring.next(free > 0) {
                Next::Keep(entry, _) => read.push(entry),
                Next::Read(entry, ticket) => {
                    free -= 1;
                    read.push(entry);
                    assert_eq!(ring.land(ticket, entry), None);
                }
                Next::Wait => return read,
            }
        }
    }

    #[test]
    fn kept_entries_are_read_once_and_the_head_when_it_is_wanted() {
        let mut ring = Ring::new(vec![Streamed, Kept, Streamed, Head, Head]);
        // Ahead of the first step, up to the head.
        assert_eq!(fill(&mut ring, 9), [0, 1, 2]);
        ring.begin_step(true);
        assert_eq!(fill(&mut ring, 9), [3, 4, 0, 2], "the next pass, up to its head");
        for entry in [0, 2, 3, 4] {
            assert_eq!(ring.take(entry), Some(entry));
        }
        ring.end_step();
        ring.begin_step(false);
        assert_eq!(fill(&mut ring, 9), [0, 2], "no head");
        for entry in [0, 2] {
            assert_eq!(ring.take(entry), Some(entry));
        }
        assert_eq!(ring.take(0), Some(0), "of the third pass");
    }

    #[test]
    fn readers_wait_for_buffers_and_land_in_any_order() {
        let mut ring = Ring::new(vec![Streamed; 3]);
        ring.begin_step(false);
        let (Next::Read(0, a), Next::Read(1, b)) = (ring.next(true), ring.next(true)) else {
            panic!("two reads");
        };
        assert_eq!(ring.next(false), Next::Wait);
        assert_eq!(ring.land(b, 11), None);
        assert_eq!(ring.take(0), None, "not there yet");
        assert_eq!(ring.land(a, 10), None);
        assert_eq!((ring.take(0), ring.take(1)), (Some(10), Some(11)));
        assert!(matches!(ring.next(true), Next::Read(2, _)));
    }

    #[test]
    fn a_step_that_is_given_up_starts_over() {
        let mut ring = Ring::new(vec![Streamed, Kept, Streamed]);
        ring.begin_step(false);
        let Next::Read(0, old) = ring.next(true) else { panic!("a read") };
        assert_eq!(ring.next(true), Next::Keep(1, 1));
        assert!(ring.keep_failed(1, 1));
        let Next::Read(2, done) = ring.next(true) else { panic!("a read") };
        assert_eq!(ring.land(done, 5), None);
        assert_eq!(ring.begin_step(false), [5], "what had landed comes back");
        assert_eq!(ring.land(old, 6), Some(6), "and so does what lands late");
        assert_eq!(fill(&mut ring, 9), [1, 0, 2, 0, 2], "this step and the next");
    }

    #[test]
    fn a_kept_entry_that_fails_is_tried_once_in_every_step() {
        let mut ring: Ring<usize> = Ring::new(vec![Kept, Kept]);
        assert_eq!((ring.next(true), ring.next(true)), (Next::Keep(0, 0), Next::Keep(1, 0)));
        assert!(ring.keep_failed(0, 0));
        assert_eq!(ring.next(true), Next::Wait, "not over and over");
        ring.begin_step(false);
        assert_eq!(ring.next(true), Next::Keep(0, 1));
        assert!(!ring.keep_failed(1, 0), "what was asked of it is over");
        assert_eq!(ring.next(true), Next::Keep(1, 1));
        assert_eq!(ring.next(true), Next::Wait);
    }

    #[test]
    fn nothing_streamed_means_nothing_to_do() {
        let mut ring: Ring<usize> = Ring::new(vec![Kept, Kept]);
        assert_eq!(fill(&mut ring, 0), [0, 1]);
        ring.begin_step(true);
        assert_eq!(ring.next(true), Next::Wait);
        assert_eq!(Ring::<usize>::new(vec![]).next(true), Next::Wait);
    }
}
