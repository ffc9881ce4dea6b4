//! Reads every expert once: its CRC-32, and whether its scales are numbers.

use std::ops::Range;
use std::path::Path;

use k3_formats::config::ModelConfig;
use k3_formats::container::EXPERT_TABLE_FILE;
use k3_formats::container::manifest::{Manifest, ShardRecord};
use k3_formats::expert_table::{ExpertTable, with_checksums, without_checksums};
use k3_formats::tensor_name::{ExpertPart, expert_bytes, expert_tensor_name};
use k3_formats::{Error, Result};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::block_reader::{BlockReader, Pages};
use crate::expert_scales::{is_scale, not_a_number};
use crate::folder::{OutputFolder, REPLACE};
use crate::identity::Identity;
use crate::journal::Journal;
use crate::plan::ConversionPlan;
use crate::problems::{Lines, Problems};
use crate::progress::{Progress, Talk};

mod state;

pub(crate) use state::SUMS_STATE_FILE;
use state::SumsState;

/// Experts that are hashed between two records of what was done, for each thread: half a
/// gigabyte of the release, less than a second's work.
const BATCH: usize = 32;

/// Where the experts of a model are.
pub(crate) struct Experts<'a, B> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) table: &'a ExpertTable<B>,
    /// The shards by number.
    pub(crate) shards: Vec<Result<BlockReader>>,
}

/// What was read of one expert.
#[derive(Debug)]
pub(crate) struct Sum {
    /// CRC-32 of its bytes.
    pub(crate) crc32: u32,
    /// That a scale is NaN.
    pub(crate) nan: Option<Error>,
}

impl<B: AsRef<[u8]> + Sync> Experts<'_, B> {
    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.config.moe_layers().len() * self.config.moe.experts
    }

    /// Layer and number in it of expert `i`, counted through all layers.
    pub(crate) fn place(&self, i: usize) -> (usize, usize) {
        let per_layer = self.config.moe.experts;
        (self.config.moe_layers().start + i / per_layer, i % per_layer)
    }

    /// The checksum of each expert of a range of the table, in order, or why it cannot be
    /// read. Reads each byte once, on the threads of the current pool.
    pub(crate) fn sums(&self, range: Range<usize>, progress: &Progress) -> Vec<Result<Sum>> {
        range.into_par_iter().map(|i| self.sum(i, progress)).collect()
    }

    fn sum(&self, i: usize, progress: &Progress) -> Result<Sum> {
        let bytes = usize::try_from(expert_bytes(self.config)).expect("bounded by the config");
        let sum = self.read(i, &mut vec![0; bytes])?;
        progress.add(bytes as u64);
        Ok(sum)
    }

    /// Reads the six parts of expert `i`, one behind the other, into `data`, which is as long.
    pub(crate) fn read(&self, i: usize, data: &mut [u8]) -> Result<Sum> {
        let (layer, expert) = self.place(i);
        let (mut hasher, mut nan, mut rest) = (crc32fast::Hasher::new(), None, data);
        for part in ExpertPart::ALL {
            let name = || expert_tensor_name(layer, expert, part);
            let (shard, offset) = self.table.entry(layer, expert).part(part);
            let reader = match &self.shards[shard] {
                Ok(reader) => reader,
                Err(error) => return Err(Error::missing(error.to_string()).item(name())),
            };
            let bytes = usize::try_from(part.bytes(self.config)).expect("bounded by the config");
            let (data, behind) = rest.split_at_mut(bytes);
            reader.read(data, offset).map_err(|e| e.item(name()))?;
            if is_scale(part)
                && let Some(error) = not_a_number(self.config, part, data)
            {
                nan.get_or_insert(error.item(name()).in_file(reader.path()));
            }
            hasher.update(data);
            rest = behind;
        }
        Ok(Sum { crc32: hasher.finalize(), nan })
    }

    /// The shards that experts of a range lie in.
    fn shards_of(&self, range: Range<usize>, records: &[ShardRecord]) -> Vec<ShardRecord> {
        let places = range.flat_map(|i| {
            let (layer, expert) = self.place(i);
            ExpertPart::ALL.map(|part| self.table.entry(layer, expert).part(part).0)
        });
        let numbers: std::collections::BTreeSet<usize> = places.collect();
        numbers.into_iter().map(|n| records[n].clone()).collect()
    }
}

/// How experts are hashed before a conversion.
#[derive(Clone, Copy)]
pub struct ExpertHashing<'a> {
    /// Where the container will be; what is done is kept in its work folder.
    pub out: &'a Path,
    /// Replace a container that is there already.
    pub force: bool,
    /// Take experts with a scale of NaN as they are, and say so.
    pub allow_nonfinite: bool,
    /// Whether to say how far it is.
    pub talk: Talk,
    /// Threads that hash.
    pub pool: &'a ThreadPool,
}

impl ConversionPlan {
    /// Reads all experts and puts a checksum of each into the expert table; returns what is
    /// odd about them. A run that was interrupted goes on where it stopped, and a container
    /// that has them already is not made to read them again.
    ///
    /// # Errors
    /// Shards that cannot be read, and scales that are NaN: all of them are named. Another
    /// container, or another conversion, is in the way.
    pub fn hash_experts(&mut self, how: ExpertHashing<'_>) -> Result<Vec<String>> {
        let folder = OutputFolder::check(how.out, &self.snapshot, how.force)?;
        let sizes: Vec<u64> = self.shards.iter().map(|s| s.size).collect();
        let table = ExpertTable::new(self.expert_table(), &self.config, &sizes)?;
        let open = |path| BlockReader::open(path, Pages::Drop);
        let shards = self.shard_paths.iter().map(|path| open(path)).collect();
        let experts = Experts { config: &self.config, table: &table, shards };
        let mut oddities = Lines::default();
        let sums = match folder.existing()? {
            Some(manifest) => self.sums_of(&manifest, &folder, &experts)?,
            None => self.read_sums(&folder, &experts, how, &mut oddities)?,
        };
        self.set_checksums(&sums);
        Ok(oddities.into_lines())
    }

    /// Puts a checksum of each expert, in the order of the table, into it.
    pub(crate) fn set_checksums(&mut self, sums: &[u32]) {
        if let Some(file) = self.small.iter_mut().find(|file| file.name == EXPERT_TABLE_FILE) {
            file.bytes = with_checksums(std::mem::take(&mut file.bytes), sums);
        }
    }

    /// The checksums in the table of a container that is there already.
    fn sums_of<B: AsRef<[u8]> + Sync>(
        &self,
        manifest: &Manifest,
        folder: &OutputFolder,
        experts: &Experts<'_, B>,
    ) -> Result<Vec<u32>> {
        let path = folder.out().join(EXPERT_TABLE_FILE);
        let bytes = fs_err::read(&path).map_err(|e| Error::io(&path, "read", e).hint(REPLACE))?;
        let same =
            without_checksums(&bytes) == self.expert_table() && manifest.shards == self.shards;
        if !same {
            let error = Error::mismatch("there is another container already: the snapshot differs");
            return Err(error.in_file(folder.out()).hint(REPLACE));
        }
        let sizes: Vec<u64> = self.shards.iter().map(|s| s.size).collect();
        let table = ExpertTable::new(bytes, &self.config, &sizes)
            .map_err(|e| e.in_file(&path).hint(REPLACE))?;
        let sum = |i| {
            let (layer, expert) = experts.place(i);
            table.checksum(layer, expert)
        };
        (0..experts.count()).map(sum).collect::<Option<_>>().ok_or_else(|| {
            Error::mismatch("there is a container already, made without --hash-experts")
                .in_file(folder.out())
                .hint(REPLACE)
        })
    }

    fn read_sums<B: AsRef<[u8]> + Sync>(
        &self,
        folder: &OutputFolder,
        experts: &Experts<'_, B>,
        how: ExpertHashing<'_>,
        oddities: &mut Lines,
    ) -> Result<Vec<u32>> {
        folder.create()?;
        let mut journal = Journal::lock(folder.work())?;
        if !how.force {
            // Whether the conversion can go on is better known before a terabyte is read.
            journal.resume(&Identity::of_work(self))?;
        }
        let mut sums = vec![None; experts.count()];
        let mut state = SumsState::open(folder.work())?;
        state.restore(&mut sums, &self.shards)?;
        let each = expert_bytes(&self.config);
        let progress = Progress::start("read experts", sums.len() as u64 * each, how.talk);
        let known = sums.iter().flatten().count();
        progress.skip(known as u64 * each);
        let mut problems = Problems::default();
        let batch = BATCH * how.pool.current_num_threads();
        for first in (0..sums.len()).step_by(batch) {
            let range = first..(first + batch).min(sums.len());
            if sums[range.clone()].iter().all(Option::is_some) {
                continue;
            }
            let before = problems.len();
            let mut read = Vec::with_capacity(range.len());
            for sum in how.pool.install(|| experts.sums(range.clone(), &progress)) {
                match sum {
                    Ok(Sum { nan: Some(error), .. }) if !how.allow_nonfinite => {
                        problems.add(&error)
                    }
                    Ok(Sum { crc32, nan }) => {
                        read.push(crc32);
                        nan.iter().for_each(|nan| oddities.add(|| nan.to_string()));
                    }
                    Err(error) => problems.add(&error),
                }
            }
            if problems.len() == before {
                state.add(first, &read, experts.shards_of(range.clone(), &self.shards))?;
                sums[range].iter_mut().zip(read).for_each(|(place, sum)| *place = Some(sum));
            }
        }
        progress.finish();
        if let Some(error) = problems.into_error("experts cannot be used") {
            return Err(error);
        }
        Ok(sums.into_iter().flatten().collect())
    }
}
