//! Are the scale bytes of the experts numbers? In E8M0 every byte is a power of two but
//! 255, which is NaN, and one of those makes everything after it NaN.
//!
//! Experts are not converted, so looking at all of their scales would mean reading 85 GB of
//! the release for nothing else. Where they are more than [`SAMPLE`], evenly spaced experts
//! are looked at; `verify --experts` looks at all.

use k3_formats::config::ModelConfig;
use k3_formats::expert_table::ExpertTable;
use k3_formats::tensor_name::{ExpertPart, expert_tensor_name};
use k3_formats::{Error, Result};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::block_reader::{BlockReader, Pages};
use crate::output;
use crate::plan::ConversionPlan;
use crate::problems::Problems;

/// Most bytes of scales that a conversion reads.
const SAMPLE: u64 = 1 << 30;

/// The byte that is no power of two.
const NAN: u8 = 255;

const SCALES: [ExpertPart; 3] = [ExpertPart::GateScale, ExpertPart::DownScale, ExpertPart::UpScale];

/// Looks at the scales of all experts, or of evenly spaced ones where all are too many.
/// Where `allow` is set, a NaN is warned of and no error.
///
/// # Errors
/// A scale is NaN: names every tensor that has one, and the first in each.
pub(crate) fn check(plan: &ConversionPlan, pool: &ThreadPool, allow: bool) -> Result<()> {
    let config = &plan.config;
    let sizes: Vec<u64> = plan.shards.iter().map(|s| s.size).collect();
    let table = ExpertTable::new(plan.expert_table(), config, &sizes)?;
    let experts = config.moe_layers().len() * config.moe.experts;
    let each: u64 = SCALES.iter().map(|part| part.bytes(config)).sum();
    let step = (experts as u64 * each).div_ceil(SAMPLE).max(1) as usize;
    let readers: Vec<_> =
        plan.shard_paths.iter().map(|path| BlockReader::open(path, Pages::Keep)).collect();
    let look = |number: usize, part: ExpertPart| -> Result<()> {
        let layer = config.moe_layers().start + number / config.moe.experts;
        let expert = number % config.moe.experts;
        let (shard, offset) = table.entry(layer, expert).part(part);
        let mut scales = vec![0; usize::try_from(part.bytes(config)).expect("bounded by config")];
        match &readers[shard] {
            Ok(reader) => reader.read(&mut scales, offset)?,
            // Reading it has its own message; this one says it again for each tensor.
            Err(error) => return Err(Error::missing(error.to_string())),
        }
        not_a_number(config, part, &scales).map_or(Ok(()), |error| {
            let error = error.item(expert_tensor_name(layer, expert, part));
            Err(error.in_file(&plan.shard_paths[shard]))
        })
    };
    let numbers: Vec<usize> = (0..experts).step_by(step).collect();
    let errors: Vec<Error> = pool.install(|| {
        numbers
            .par_iter()
            .flat_map_iter(|&n| SCALES.into_iter().filter_map(move |part| look(n, part).err()))
            .collect()
    });
    let mut problems = Problems::default();
    errors.iter().for_each(|error| problems.add(error));
    match problems.into_error("scales of experts are not numbers") {
        Some(error) if allow => {
            output::warn(error);
            Ok(())
        }
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// Whether a part of an expert is scales.
pub(crate) fn is_scale(part: ExpertPart) -> bool {
    SCALES.contains(&part)
}

/// The first NaN among the scales of a part.
pub(crate) fn not_a_number(config: &ModelConfig, part: ExpertPart, scales: &[u8]) -> Option<Error> {
    let at = scales.iter().position(|&scale| scale == NAN)?;
    let [_, cols] = part.shape(config);
    let (row, col) = (at / cols, at % cols);
    let problem = format!("the scale in row {row}, column {col} (byte {at}) is 255, which is NaN");
    Some(Error::malformed(problem).hint(NOT_FINITE))
}

/// What to do about weights that are no numbers.
pub(crate) const NOT_FINITE: &str = "the file is damaged, or was never right; check it against \
     its published digest, or give --allow-nonfinite to convert it all the same";
