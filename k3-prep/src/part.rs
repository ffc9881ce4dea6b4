//! Parts of a conversion, each done by a process of its own: in the same output folder, on
//! machines that share it, or one after another while the download still runs.

use std::path::Path;
use std::str::FromStr;

use k3_formats::container::manifest::ShardRecord;
use k3_formats::{Error, Result};

use crate::conversion::{Conversion, enough_space, existing, not_in, trusted};
use crate::folder::OutputFolder;
use crate::identity::Identity;
use crate::journal::{self, Journal};
use crate::plan::{ConversionPlan, DenseFile};

/// Bytes that a file system may take for a file beside its data.
const AROUND: u64 = 4096;

/// Some shards by number, counted from 1 in name order: as the release's names count them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardRange {
    first: usize,
    last: usize,
}

impl FromStr for ShardRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let number = |text: &str| text.parse().map_err(|_| format!("{text:?} is no number"));
        let range = Self { first: number(first)?, last: number(last)? };
        if range.first == 0 || range.first > range.last {
            return Err("expected FIRST-LAST, counted from 1".into());
        }
        Ok(range)
    }
}

impl std::fmt::Display for ShardRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// Which of a plan's dense files to convert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Those whose last shard, the highest number that has a tensor of theirs, is one of these.
    Shards(ShardRange),
    /// All that the plan has, which may be one of a download that is not complete.
    Follow,
}

impl Part {
    const FOLLOW: &'static str = "follow";

    fn name(self) -> String {
        match self {
            Self::Shards(range) => range.to_string(),
            Self::Follow => Self::FOLLOW.to_owned(),
        }
    }

    fn has(self, file: &DenseFile) -> bool {
        match self {
            Self::Shards(range) => (range.first..=range.last).contains(&last_shard(file)),
            Self::Follow => true,
        }
    }

    /// Whether the part of this name may have files of this one.
    fn overlaps(self, other: &str) -> bool {
        match (self, other.parse::<ShardRange>()) {
            (Self::Shards(a), Ok(b)) => a.first <= b.last && b.first <= a.last,
            _ => true,
        }
    }
}

/// Number, from 1, of the last shard that has a tensor of this file.
fn last_shard(file: &DenseFile) -> usize {
    file.tensors.iter().map(|t| t.shard + 1).max().unwrap_or(1)
}

/// How much of a part is done.
#[derive(Debug, Clone, Copy)]
pub struct PartDone {
    /// Dense files of the part.
    pub files: usize,
    /// Those that were converted now.
    pub converted: usize,
    /// Whether the container is complete already.
    pub complete: bool,
}

impl Conversion<'_> {
    /// Converts a part into the work folder of `out`, beside other processes that convert
    /// other parts. [`Conversion::finish`] makes a container of it.
    ///
    /// # Errors
    /// As [`Conversion::run`]; also when another process converts some of the same files, or
    /// there are no such shards.
    pub fn part(self, plan: &ConversionPlan, out: &Path, part: Part) -> Result<PartDone> {
        let folder = OutputFolder::check(out, &plan.snapshot, false)?;
        if let Part::Shards(range) = part
            && range.last > plan.shards.len()
        {
            let problem = format!("no shards {range}: there are {}", plan.shards.len());
            return Err(Error::unsupported(problem).in_file(&plan.snapshot));
        }
        let complete = match part {
            Part::Shards(_) => existing(plan, &folder)?.is_some(),
            // Whether it is the right one cannot be said before all shards are there.
            Part::Follow => folder.existing()?.is_some(),
        };
        if complete {
            return Ok(PartDone { files: 0, converted: 0, complete });
        }
        folder.create()?;
        let identity = Identity::of_parts(&plan.recipe);
        // Before there is a journal of its own, which would be in the way of the others.
        journal::done_in_parts(folder.work(), &identity)?;
        let name = journal::part_name(&part.name());
        let mut journal = Journal::lock_part(folder.work(), &name)?;
        journal.resume(&identity)?;
        // After its own lock: of two that overlap, at least one sees the other.
        for other in journal::part_journals(folder.work())? {
            let overlaps = journal::part_of(&other).is_some_and(|other| part.overlaps(other));
            if other != name && overlaps && journal::is_held(folder.work(), &other) {
                return Err(journal::busy(folder.work()));
            }
        }
        let done = trusted(plan, folder.work(), journal::done_in_parts(folder.work(), &identity)?);
        let todo = not_in(&done, plan, |file| part.has(file));
        let bytes = |&i: &usize| plan.dense[i].layout.file_size() + AROUND;
        enough_space(&folder, todo.iter().map(bytes).sum())?;
        let converted = todo.len();
        self.dense_files(plan, &folder, todo, |record| {
            let file = plan.dense.iter().find(|f| f.name == record.name);
            journal.record(record, shards_of(plan, file.expect("the plan named it")))
        })?;
        let files = plan.dense.iter().filter(|file| part.has(file)).count();
        Ok(PartDone { files, converted, complete: false })
    }
}

/// The shards that have tensors of a file.
fn shards_of(plan: &ConversionPlan, file: &DenseFile) -> Vec<ShardRecord> {
    let mut numbers: Vec<usize> = file.tensors.iter().map(|t| t.shard).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers.into_iter().map(|n| plan.shards[n].clone()).collect()
}

/// That nobody has converted the dense files numbered in `todo`.
pub(crate) fn not_converted(plan: &ConversionPlan, todo: &[usize], dir: &Path) -> Error {
    let mut shards: Vec<usize> = todo.iter().map(|&i| last_shard(&plan.dense[i])).collect();
    shards.sort_unstable();
    shards.dedup();
    let shards: Vec<String> = shards.iter().map(usize::to_string).collect();
    let (open, all) = (todo.len(), plan.dense.len());
    let problem = format!(
        "{open} of {all} dense files are not converted yet, those of --shards {}",
        shards.join(", ")
    );
    Error::missing(problem)
        .in_file(dir)
        .hint("convert them with --shards, or leave out --finish to convert them here")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_and_compared() {
        let range = |text: &str| text.parse::<ShardRange>();
        assert_eq!(range("3-17").unwrap().to_string(), "3-17");
        assert_eq!(range("5").unwrap(), range("5-5").unwrap());
        for bad in ["", "0-3", "4-3", "a-b", "1-", "-2", "1-2-3"] {
            assert!(range(bad).is_err(), "{bad}");
        }
        let part = Part::Shards(range("3-7").unwrap());
        assert!(part.overlaps("7-9") && part.overlaps("1-3") && part.overlaps("follow"));
        assert!(!part.overlaps("8-9") && Part::Follow.overlaps("8-9"));
    }
}
