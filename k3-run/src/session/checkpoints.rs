//! Copies of the KDA states at earlier positions, in memory or in files.
//!
//! The latents need no copy: they are only appended to, so a checkpoint is of use as long
//! as the sequence has not been cut before its position.
//!
//! Which checkpoint goes when there are too many: the one whose loss is expected to cost
//! least. Prompts diverge near the end more often than far from it, with a density of
//! 1/distance; a prompt that diverges right behind a checkpoint costs the tokens between
//! that one and the one before when it is gone. The shallowest counts more, since a new
//! conversation shares the system message with the old one, and so does one that has been
//! gone back to. The deepest stays.

use std::io::{Read, Seek, Write};
use std::path::PathBuf;

use anyhow::Context;
use fs_err::File;

use crate::state::SequenceState;

/// Fewest tokens between two turn boundaries that are both worth a stop on the way.
const APART: usize = 16;

/// Chance that the next prompt is a new conversation.
const NEW_CONVERSATION: f64 = 0.25;

/// The checkpoints of one session, shallowest first.
#[derive(Debug)]
pub(super) struct Checkpoints {
    limit: usize,
    dir: Option<PathBuf>,
    kept: Vec<Checkpoint>,
    /// Memory of one that is gone, for the next.
    spare: Option<Place>,
    problem: Option<anyhow::Error>,
}

#[derive(Debug)]
struct Checkpoint {
    position: usize,
    /// Logits after `position` tokens, if they are known.
    logits: Vec<f32>,
    place: Place,
    /// Times it was gone back to.
    hits: u32,
}

/// Where the values of the KDA states are.
#[derive(Debug)]
enum Place {
    Memory(Vec<f32>),
    /// Without a name, so that it goes with the process.
    File(File),
}

impl Checkpoints {
    pub(super) fn new(limit: usize, dir: Option<PathBuf>) -> Self {
        Self { limit, dir, kept: Vec::new(), spare: None, problem: None }
    }

    pub(super) fn positions(&self) -> impl Iterator<Item = usize> {
        self.kept.iter().map(|c| c.position)
    }

    pub(super) fn take_problem(&mut self) -> Option<anyhow::Error> {
        self.problem.take()
    }

    /// The deepest one that serves at this position, with or without logits.
    pub(super) fn deepest(&self, serves: impl Fn(usize, bool) -> bool) -> Option<usize> {
        let mut deepest_first = self.kept.iter().rev();
        let found = deepest_first.find(|c| serves(c.position, !c.logits.is_empty()))?;
        Some(found.position)
    }

    /// The sequence has been cut at `position`.
    pub(super) fn drop_behind(&mut self, position: usize) {
        let keep = self.kept.partition_point(|c| c.position <= position);
        if let Some(gone) = self.kept.drain(keep..).next_back() {
            self.spare = Some(gone.place);
        }
    }

    /// Copies the state, unless there is a copy already. A failure is noted.
    pub(super) fn take(&mut self, state: &SequenceState, logits: &[f32]) {
        let position = state.position();
        if self.limit == 0 {
            return;
        }
        if let Some(last) = self.kept.last_mut()
            && last.position == position
        {
            if last.logits.is_empty() {
                last.logits.extend_from_slice(logits);
            }
            return;
        }
        while self.kept.len() >= self.limit {
            let marks = self.kept.iter().map(|c| (c.position, c.hits));
            let marks: Vec<_> = marks.chain([(position, 0)]).collect();
            self.spare = Some(self.kept.remove(least_useful(&marks)).place);
        }
        match self.copy(state) {
            Ok(place) => {
                let logits = logits.to_vec();
                self.kept.push(Checkpoint { position, logits, place, hits: 0 });
            }
            Err(problem) => self.problem = Some(problem),
        }
    }

    fn copy(&mut self, state: &SequenceState) -> anyhow::Result<Place> {
        match (&self.dir, self.spare.take()) {
            (None, Some(Place::Memory(mut values))) => {
                values.clear();
                state.kda_values().for_each(|v| values.extend_from_slice(v));
                Ok(Place::Memory(values))
            }
            (None, _) => {
                let mut values = Vec::new();
                let len = state.kda_values().map(<[f32]>::len).sum();
                values.try_reserve_exact(len).context("no memory for a checkpoint")?;
                state.kda_values().for_each(|v| values.extend_from_slice(v));
                Ok(Place::Memory(values))
            }
            (Some(dir), spare) => {
                let mut file = match spare {
                    Some(Place::File(file)) => file,
                    _ => {
                        let file = tempfile::tempfile_in(dir).with_context(|| {
                            format!("{}: cannot create a checkpoint", dir.display())
                        })?;
                        File::from_parts(file, dir.join("checkpoint"))
                    }
                };
                file.rewind()?;
                state.kda_values().try_for_each(|v| file.write_all(bytemuck::cast_slice(v)))?;
                Ok(Place::File(file))
            }
        }
    }

    /// Takes the state back to the checkpoint at `position`, and `logits` to those known
    /// there. One that cannot be read is dropped and noted; the state is torn then.
    pub(super) fn restore(
        &mut self,
        position: usize,
        state: &mut SequenceState,
        logits: &mut Vec<f32>,
    ) -> bool {
        let Some(at) = self.positions().position(|p| p == position) else { return false };
        let restored = match &mut self.kept[at].place {
            Place::Memory(values) => {
                let mut rest = values.as_slice();
                state.restore(position, |part| {
                    let (values, behind) = rest.split_at(part.len());
                    part.copy_from_slice(values);
                    rest = behind;
                    Ok(())
                })
            }
            Place::File(file) => file.rewind().and_then(|()| {
                state.restore(position, |part| file.read_exact(bytemuck::cast_slice_mut(part)))
            }),
        };
        match restored {
            Ok(()) => {
                let checkpoint = &mut self.kept[at];
                checkpoint.hits += 1;
                logits.clone_from(&checkpoint.logits);
                true
            }
            Err(error) => {
                self.problem = Some(anyhow::Error::from(error).context("cannot read a checkpoint"));
                self.kept.remove(at);
                false
            }
        }
    }

    /// Where to stop on the way from position `start` to a prompt of `end` tokens whose
    /// messages begin at `turns`: the places whose checkpoints would still be there at its
    /// end.
    pub(super) fn plan(
        &self,
        start: usize,
        end: usize,
        turns: impl Iterator<Item = usize>,
    ) -> Vec<usize> {
        if self.limit == 0 {
            return Vec::new();
        }
        let mut marks: Vec<_> = self.kept.iter().map(|c| (c.position, c.hits)).collect();
        let mut last = start;
        for turn in turns {
            if turn >= last + APART && turn + APART <= end {
                marks.push((turn, 0));
                last = turn;
            }
        }
        marks.push((end, 0));
        while marks.len() > self.limit {
            marks.remove(least_useful(&marks));
        }
        marks.iter().map(|m| m.0).filter(|p| (start + 1..end).contains(p)).collect()
    }
}

/// Which of the `(position, hits)`, shallowest first, can go best; see the module's head.
/// The last one never goes.
fn least_useful(marks: &[(usize, u32)]) -> usize {
    let end = marks.last().map_or(0, |m| m.0) as f64 + 1.0;
    let loss = |i: usize| {
        let (position, hits) = marks[i];
        let before = if i == 0 { 0 } else { marks[i - 1].0 };
        let distance = |i: usize| end - marks[i].0 as f64;
        let mut chance = (distance(i) / distance(i + 1)).ln();
        if i == 0 {
            chance += NEW_CONVERSATION;
        }
        (position - before) as f64 * chance * f64::from(1 + hits)
    };
    let candidates = 0..marks.len().saturating_sub(1);
    candidates.min_by(|&a, &b| loss(a).total_cmp(&loss(b))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_saves_most_stays() {
        // The system message, two short turns, a long one and the end of the prompt.
        let marks = [(2000, 0), (2100, 0), (2150, 0), (4000, 0), (4050, 0)];
        assert_eq!(least_useful(&marks), 1);
        let marks = [(2000, 0), (2150, 0), (4000, 0), (4050, 0)];
        assert_eq!(least_useful(&marks), 1);
        // One that has been of use stays longer.
        let marks = [(2000, 0), (2150, 3), (4000, 0), (4050, 0)];
        assert_eq!(least_useful(&marks), 0);
        assert_eq!(least_useful(&[(10, 0), (11, 0)]), 0);
    }

    #[test]
    fn stops_are_those_that_will_be_there_at_the_end() {
        let none = Checkpoints::new(0, None);
        assert_eq!(none.plan(0, 1000, [100, 200].into_iter()), [0; 0]);
        let all = Checkpoints::new(9, None);
        assert_eq!(all.plan(0, 1000, [3, 100, 110, 900, 990].into_iter()), [100, 900]);
        let two = Checkpoints::new(2, None);
        assert_eq!(two.plan(0, 1000, [100, 110, 900, 990].into_iter()), [900]);
        assert_eq!(all.plan(100, 1000, [3, 100, 110, 150, 900].into_iter()), [150, 900]);
        let one = Checkpoints::new(1, None);
        assert_eq!(one.plan(0, 1000, [100, 110, 900, 990].into_iter()), [0; 0]);
    }
}
