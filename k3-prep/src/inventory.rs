//! What a snapshot holds against what its config implies: every tensor's place, and
//! everything that is wrong, missing or surprising.

use std::collections::{HashMap, HashSet};

use k3_formats::container::manifest::ShardRecord;
use k3_formats::digest::Digest;
use k3_formats::expert_table::{ExpertTableBuilder, MAX_SHARDS};
use k3_formats::safetensors_header::{Header, TensorInfo};
use k3_formats::snapshot::{Shard, Snapshot, WeightIndex};
use k3_formats::tensor_name::{
    ExpertPart, TensorSpec, dense_tensors, expert_tensor_name, is_vision, parse_expert_name,
};
use k3_formats::{Error, Result};
use safetensors::Dtype;

use crate::problems::{Lines, Problems};
use crate::survey::for_each_header;

const INCOMPLETE: &str = "the snapshot is incomplete; download it again";

/// The complete text model of a snapshot, tensor by tensor.
pub(crate) struct Inventory<'a> {
    /// The dense tensors in execution order, each with its shard and absolute file offset.
    pub(crate) dense: Vec<(TensorSpec, usize, u64)>,
    /// The places of all experts.
    pub(crate) experts: ExpertTableBuilder<'a>,
    /// The shards in order.
    pub(crate) shards: Vec<ShardRecord>,
    /// Names of the vision tensors.
    pub(crate) vision: Vec<String>,
    /// What is odd, but no obstacle.
    pub(crate) warnings: Vec<String>,
}

impl<'a> Inventory<'a> {
    /// Reads all headers and adds everything wrong with them to `problems`; returns the
    /// inventory if there is nothing wrong with it.
    pub(crate) fn take(snapshot: &'a Snapshot, problems: &mut Problems) -> Option<Self> {
        Self::of_shards(snapshot, None, problems)
    }

    /// As [`Inventory::take`], of the shards that are marked in `ready` only: what is in the
    /// others is left out, and their records are empty.
    pub(crate) fn of_ready(
        snapshot: &'a Snapshot,
        ready: &[bool],
        problems: &mut Problems,
    ) -> Option<Self> {
        Self::of_shards(snapshot, Some(ready), problems)
    }

    fn of_shards(
        snapshot: &'a Snapshot,
        ready: Option<&[bool]>,
        problems: &mut Problems,
    ) -> Option<Self> {
        if snapshot.shards.len() > MAX_SHARDS {
            let problem =
                format!("expected at most {MAX_SHARDS} shards, found {}", snapshot.shards.len());
            problems.add(&Error::unsupported(problem).in_file(&snapshot.dir));
            return None;
        }
        let before = problems.len();
        let mut count = Count::new(snapshot, problems);
        for_each_header(snapshot, |number, shard, header| match header {
            _ if ready.is_some_and(|ready| !ready[number]) => count.shards.push(ShardRecord {
                name: shard.name.clone(),
                size: 0,
                modified_ns: 0,
                header_sha256: Digest::of(&[]),
            }),
            Ok(header) => count.shard(number, shard, &header),
            Err(error) => {
                count.unreadable.insert(number);
                count.problems.add(&error);
            }
        });
        if ready.is_none() {
            count.check_index();
            count.check_missing();
        }
        (count.problems.len() == before).then(|| count.finish())
    }
}

struct Count<'a, 'p> {
    snapshot: &'a Snapshot,
    problems: &'p mut Problems,
    specs: Vec<TensorSpec>,
    spec_of: HashMap<String, usize>,
    places: Vec<Option<(usize, u64)>>,
    experts: ExpertTableBuilder<'a>,
    shards: Vec<ShardRecord>,
    vision: Vec<String>,
    unreadable: HashSet<usize>,
    /// Tensors found where the index places them.
    as_indexed: usize,
    /// Tensors that were found, but with a type or shape that cannot be used.
    unfit: HashSet<String>,
    copies: Lines,
    unlisted: Lines,
    unknown: Lines,
}

impl<'a, 'p> Count<'a, 'p> {
    fn new(snapshot: &'a Snapshot, problems: &'p mut Problems) -> Self {
        let specs = dense_tensors(&snapshot.config);
        let spec_of = specs.iter().enumerate().map(|(i, s)| (s.name.clone(), i)).collect();
        Self {
            snapshot,
            problems,
            places: vec![None; specs.len()],
            specs,
            spec_of,
            experts: ExpertTableBuilder::new(&snapshot.config),
            shards: Vec::with_capacity(snapshot.shards.len()),
            vision: Vec::new(),
            unreadable: HashSet::new(),
            as_indexed: 0,
            unfit: HashSet::new(),
            copies: Lines::default(),
            unlisted: Lines::default(),
            unknown: Lines::default(),
        }
    }

    fn shard(&mut self, number: usize, shard: &Shard, header: &Header) {
        self.shards.push(ShardRecord {
            name: shard.name.clone(),
            size: header.file_size,
            modified_ns: shard.found.as_ref().map_or(0, |f| f.modified_ns),
            header_sha256: header.digest,
        });
        for tensor in &header.tensors {
            if !self.is_the_one(&tensor.name, number, shard) {
                continue;
            }
            if let Err(error) = self.tensor(number, header.data_start, tensor) {
                self.unfit.insert(tensor.name.clone());
                self.problems.add(&error.item(tensor.name.clone()).in_file(&shard.path));
            }
        }
    }

    /// Whether the index means this copy of the tensor.
    fn is_the_one(&mut self, name: &str, number: usize, shard: &Shard) -> bool {
        let Some(index) = &self.snapshot.index else { return true };
        match index.shard_of(name) {
            Some(meant) if meant == number => {
                self.as_indexed += 1;
                true
            }
            Some(meant) => {
                let meant = &self.snapshot.shards[meant].name;
                let here = &shard.name;
                self.copies.add(|| {
                    format!("{name}: also in {here}; the one in {meant} is used, as the index says")
                });
                false
            }
            None => {
                self.unlisted
                    .add(|| format!("{name}: in {}, but the index does not list it", shard.name));
                true
            }
        }
    }

    fn tensor(&mut self, number: usize, data_start: u64, tensor: &TensorInfo) -> Result<()> {
        let at = (number, data_start + tensor.begin);
        let name = tensor.name.as_str();
        if let Some(&i) = self.spec_of.get(name) {
            let spec = &self.specs[i];
            let shape_fits = spec.accepts_shape(&tensor.shape);
            check(spec.dtype, &spec.shape, shape_fits, tensor)?;
            let before = self.places[i].replace(at);
            return self.only_once(before);
        }
        if let Some((layer, expert, part)) = parse_expert_name(name) {
            let before = self.experts.place(layer, expert, part);
            if self.experts.set(layer, expert, part, at) {
                let shape = part.shape(&self.snapshot.config);
                check(Dtype::U8, &shape, tensor.shape == shape, tensor)?;
                return self.only_once(before);
            }
        }
        if is_vision(name) {
            self.vision.push(name.to_owned());
        } else {
            self.unknown.add(|| format!("{name}: not part of the model, left out"));
        }
        Ok(())
    }

    /// Without an index, two copies of a tensor leave no way to tell which is meant.
    fn only_once(&self, before: Option<(usize, u64)>) -> Result<()> {
        let Some((other, _)) = before else { return Ok(()) };
        let other = &self.snapshot.shards[other].name;
        Err(Error::mismatch(format!("also in {other}, and there is no index to decide")).hint(
            "download model.safetensors.index.json, or remove the shard that does not belong",
        ))
    }

    /// Tensors that the index places in a shard whose header does not have them. Headers
    /// are read a second time, but only when the number found says that some are absent.
    fn check_index(&mut self) {
        let Some(index) = &self.snapshot.index else { return };
        if self.as_indexed == index.len() {
            return;
        }
        let mut absent = absent_tensors(index, self.snapshot, &self.unreadable);
        absent.sort_unstable();
        for (shard, name) in absent {
            self.unfit.insert(name.to_owned());
            let shard = &self.snapshot.shards[shard];
            self.problems.add(
                &Error::missing("the index places it here, but the header does not have it")
                    .item(describe(name))
                    .in_file(&shard.path)
                    .hint(INCOMPLETE),
            );
        }
    }

    /// Tensors that the config implies and no shard has.
    fn check_missing(&mut self) {
        let dense = self.specs.iter().zip(&self.places).filter(|(_, place)| place.is_none());
        let mut missing: Vec<String> = dense.map(|(spec, _)| spec.name.clone()).collect();
        missing.extend(self.experts.missing());
        // What a shard without a header would hold is not known to be missing.
        missing.retain(|name| !self.unfit.contains(name) && !self.may_be_in_unreadable(name));
        for name in &missing {
            self.problems.add(
                &Error::missing("the config implies this tensor, but no shard has it")
                    .item(describe(name))
                    .in_file(&self.snapshot.dir)
                    .hint(INCOMPLETE),
            );
        }
    }

    fn finish(mut self) -> Inventory<'a> {
        let dense = self.specs.into_iter().zip(self.places).filter_map(|(spec, place)| {
            let (shard, offset) = place?;
            Some((spec, shard, offset))
        });
        self.vision.sort_unstable();
        let mut warnings = self.copies.into_lines();
        warnings.extend(self.unlisted.into_lines());
        warnings.extend(self.unknown.into_lines());
        Inventory {
            dense: dense.collect(),
            experts: self.experts,
            shards: self.shards,
            vision: self.vision,
            warnings,
        }
    }

    fn may_be_in_unreadable(&self, name: &str) -> bool {
        match &self.snapshot.index {
            Some(index) => index.shard_of(name).is_some_and(|n| self.unreadable.contains(&n)),
            None => !self.unreadable.is_empty(),
        }
    }
}

fn check(dtype: Dtype, shape: &[usize], shape_fits: bool, found: &TensorInfo) -> Result<()> {
    if found.dtype == dtype && shape_fits {
        return Ok(());
    }
    let problem = format!("expected {dtype} {shape:?}, found {} {:?}", found.dtype, found.shape);
    let hint = if shape_fits {
        "the checkpoint was saved again in another type; use the files as they were released"
    } else {
        "config.json and the weights do not belong together; download both again"
    };
    Err(Error::mismatch(problem).hint(hint))
}

/// Names an expert's tensor also in words.
fn describe(name: &str) -> String {
    let Some((layer, expert, part)) = parse_expert_name(name) else { return name.to_owned() };
    let what = match part {
        ExpertPart::GatePacked => "gate codes",
        ExpertPart::GateScale => "gate scales",
        ExpertPart::DownPacked => "down codes",
        ExpertPart::DownScale => "down scales",
        ExpertPart::UpPacked => "up codes",
        ExpertPart::UpScale => "up scales",
    };
    debug_assert_eq!(name, expert_tensor_name(layer, expert, part));
    format!("{name} (layer {layer}, expert {expert}, {what})")
}

fn absent_tensors<'i>(
    index: &'i WeightIndex,
    snapshot: &Snapshot,
    unreadable: &HashSet<usize>,
) -> Vec<(usize, &'i str)> {
    let mut by_shard: Vec<Vec<&str>> = vec![Vec::new(); snapshot.shards.len()];
    for (name, shard) in index.tensors() {
        by_shard[shard].push(name);
    }
    let mut absent = Vec::new();
    for_each_header(snapshot, |number, _, header| {
        let Ok(header) = header else { return };
        if unreadable.contains(&number) {
            return;
        }
        let present: HashSet<&str> = header.tensors.iter().map(|t| t.name.as_str()).collect();
        let gone = by_shard[number].iter().filter(|name| !present.contains(*name));
        absent.extend(gone.map(|&name| (number, name)));
    });
    absent
}
