//! Reads every expert once: its CRC-32, and whether its scales are numbers.

use k3_formats::config::ModelConfig;
use k3_formats::container::EXPERT_TABLE_FILE;
use k3_formats::expert_table::{ExpertTable, with_checksums};
use k3_formats::tensor_name::{ExpertPart, expert_bytes, expert_tensor_name};
use k3_formats::{Error, Result};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::block_reader::{BlockReader, Pages};
use crate::expert_scales::{is_scale, not_a_number};
use crate::plan::ConversionPlan;
use crate::problems::Problems;
use crate::progress::{Progress, Talk};

/// Where the experts of a model are.
pub(crate) struct Experts<'a, B> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) table: &'a ExpertTable<B>,
    /// The shards by number.
    pub(crate) shards: Vec<Result<BlockReader>>,
}

impl<B: AsRef<[u8]> + Sync> Experts<'_, B> {
    /// Layer, number and CRC-32 of every expert in the order of the table, or what is wrong
    /// with it. Reads each byte once.
    pub(crate) fn sums(&self, pool: &ThreadPool, talk: Talk) -> Vec<(usize, usize, Result<u32>)> {
        let per_layer = self.config.moe.experts;
        let layers = self.config.moe_layers();
        let all = layers.len() * per_layer;
        let progress =
            Progress::start("read experts", all as u64 * expert_bytes(self.config), talk);
        let sums = pool.install(|| {
            let each = (0..all).into_par_iter().map(|i| {
                let (layer, expert) = (layers.start + i / per_layer, i % per_layer);
                (layer, expert, self.sum(layer, expert, &progress))
            });
            each.collect()
        });
        progress.finish();
        sums
    }

    fn sum(&self, layer: usize, expert: usize, progress: &Progress) -> Result<u32> {
        let mut hasher = crc32fast::Hasher::new();
        for part in ExpertPart::ALL {
            let name = || expert_tensor_name(layer, expert, part);
            let (shard, offset) = self.table.entry(layer, expert).part(part);
            let reader = match &self.shards[shard] {
                Ok(reader) => reader,
                Err(error) => return Err(Error::missing(error.to_string()).item(name())),
            };
            let bytes = usize::try_from(part.bytes(self.config)).expect("bounded by the config");
            let mut data = vec![0; bytes];
            reader.read(&mut data, offset).map_err(|e| e.item(name()))?;
            if is_scale(part) {
                not_a_number(self.config, part, &data)
                    .map_or(Ok(()), |error| Err(error.item(name()).in_file(reader.path())))?;
            }
            hasher.update(&data);
            progress.add(bytes as u64);
        }
        Ok(hasher.finalize())
    }
}

impl ConversionPlan {
    /// Reads all experts and puts a checksum of each into the expert table.
    ///
    /// # Errors
    /// Shards that cannot be read, and scales that are NaN: all of them are named.
    pub fn hash_experts(&mut self, pool: &ThreadPool, talk: Talk) -> Result<()> {
        let sizes: Vec<u64> = self.shards.iter().map(|s| s.size).collect();
        let table = ExpertTable::new(self.expert_table(), &self.config, &sizes)?;
        let open = |path| BlockReader::open(path, Pages::Drop);
        let shards = self.shard_paths.iter().map(|path| open(path)).collect();
        let experts = Experts { config: &self.config, table: &table, shards };
        let mut problems = Problems::default();
        let mut sums = Vec::new();
        for (_, _, sum) in experts.sums(pool, talk) {
            match sum {
                Ok(sum) => sums.push(sum),
                Err(error) => problems.add(&error),
            }
        }
        if let Some(error) = problems.into_error("experts cannot be used") {
            return Err(error);
        }
        if let Some(file) = self.small.iter_mut().find(|file| file.name == EXPERT_TABLE_FILE) {
            file.bytes = with_checksums(std::mem::take(&mut file.bytes), &sums);
        }
        Ok(())
    }
}
