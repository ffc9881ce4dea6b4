//! Where experts are: in the original shards, by the expert table, or in the banks of a pack.

use std::path::PathBuf;

use k3_formats::container::Container;
use k3_formats::expert_table::ExpertEntry;
use k3_formats::pack::{PACK_FILE, Pack, PackHeader};
use k3_formats::{Error, Result};

/// One file with experts, as it should be.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) size: u64,
    /// Time of the last change, where it says something.
    pub(super) modified_ns: Option<u64>,
}

/// The files with experts, and where in them each expert is.
#[derive(Debug)]
pub(super) enum Places {
    /// In the shards that were converted, as the expert table says.
    Shards,
    /// In one bank a layer, in the order of their numbers.
    Banks { pack: Pack },
}

impl Places {
    /// A pack, where one of `dirs` has one, else the shards. What the user should know goes
    /// to `notes`.
    ///
    /// # Errors
    /// The pack is not complete, or of other experts than the container's.
    pub(super) fn find(
        container: &Container,
        dirs: &[PathBuf],
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        for dir in dirs {
            let Some(pack) = Pack::read(dir)? else { continue };
            let manifest = &container.manifest;
            let wanted = PackHeader::new(&container.config, &manifest.source, &manifest.shards);
            let other = pack.header.difference(&wanted).or_else(|| checksums(container, &pack));
            if let Some(difference) = other {
                let problem = format!("not a pack of this container's experts: {difference}");
                return Err(Error::mismatch(problem)
                    .in_file(dir.join(PACK_FILE))
                    .hint("give the folder of its own pack, or of its snapshot, with --snapshot"));
            }
            pack.complete().map_err(|e| e.in_file(dir))?;
            if !pack.header.same_times(&wanted) {
                notes.push(format!(
                    "the experts in {} were copied from shards with other modification times than \
                     those that were converted",
                    dir.display()
                ));
            }
            return Ok(Self::Banks { pack });
        }
        Ok(Self::Shards)
    }

    /// The files, by the numbers that entries use.
    pub(super) fn files(&self, container: &Container) -> Vec<Wanted> {
        match self {
            Self::Shards => {
                let shards = container.manifest.shards.iter();
                let wanted = |shard: &k3_formats::container::manifest::ShardRecord| Wanted {
                    name: shard.name.clone(),
                    size: shard.size,
                    modified_ns: Some(shard.modified_ns),
                };
                shards.map(wanted).collect()
            }
            Self::Banks { pack } => {
                let banks = pack.header.layer_range().filter_map(|layer| pack.bank(layer));
                let wanted = |bank: &k3_formats::pack::BankRecord| Wanted {
                    name: bank.name.clone(),
                    size: bank.size,
                    modified_ns: None,
                };
                banks.map(wanted).collect()
            }
        }
    }

    /// What the files are, in the plural.
    pub(super) fn what(&self) -> &'static str {
        match self {
            Self::Shards => "shards",
            Self::Banks { .. } => "banks",
        }
    }

    /// The place of an expert.
    pub(super) fn entry(&self, container: &Container, layer: usize, expert: usize) -> ExpertEntry {
        match self {
            Self::Shards => *container.experts.entry(layer, expert),
            Self::Banks { pack } => {
                let bank = layer - pack.header.first_layer;
                let offset = expert as u64 * pack.header.stride;
                ExpertEntry::in_run(&container.config, bank, offset)
            }
        }
    }

    /// The CRC-32 of an expert, if it was recorded at the conversion or by the copy.
    pub(super) fn checksum(
        &self,
        container: &Container,
        layer: usize,
        expert: usize,
    ) -> Option<u32> {
        container.experts.checksum(layer, expert).or_else(|| match self {
            Self::Shards => None,
            Self::Banks { pack } => pack.bank(layer)?.crc32.0.get(expert).copied(),
        })
    }
}

/// Whether the checksums of conversion and copy differ, where both recorded them.
fn checksums(container: &Container, pack: &Pack) -> Option<String> {
    pack.banks.iter().find_map(|bank| {
        let mut sums = bank.crc32.0.iter().enumerate();
        let other = |(expert, sum): (usize, &u32)| {
            container.experts.checksum(bank.layer, expert).is_some_and(|known| known != *sum)
        };
        let expert = sums.position(other)?;
        Some(format!("layer {} expert {expert} has another CRC-32", bank.layer))
    })
}
