//! The memory budget: every buffer of the engine, derived from the config and counted
//! here, and what is done with the rest.
//!
//! A plan is made before anything is taken and can be printed as it is. First come the
//! parts that cannot be smaller; then the dense weights, because a byte of them that is
//! kept is a byte that no token reads again; then the cache of experts.

use k3_formats::Error;
use k3_formats::config::ModelConfig;
use k3_formats::container::{Container, EXPERT_TABLE_FILE, TOKENIZER_FILE};
use k3_formats::tensor_name::{TensorClass, dense_tensors};
use serde::Serialize;

use crate::dense::{DenseMatrix, Pieces, Placement, RING_SLOTS, choose, kept_bytes};
use crate::engine;
use crate::experts::{CacheSize, ExpertShape, IN_FLIGHT};
use crate::kernels::{Arithmetic, THREAD_BYTES};
use crate::state::{KvType, kda_bytes, latent_bytes};

mod reuse;
mod spare;
pub(crate) mod speed;

pub use spare::{Spare, spare};

/// Code, stacks and the allocator's own, measured at ready with a margin.
const PROGRAM: u64 = 14 << 20;

/// Stack and allocator of a thread, as far as they are touched.
const PER_THREAD: u64 = 512 << 10;

/// A fault on a mapped page may map what the page cache holds around it, in bytes.
const FAULT_AROUND: u64 = 64 << 10;

/// Bookkeeping of the expert cache, in bytes for each expert and for each slot.
const BOOKS_PER_EXPERT: u64 = 64;
const BOOKS_PER_SLOT: u64 = 256;

/// Where the dense weights are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum MemoryMode {
    /// Mapped if the budget holds all of them, else streamed.
    #[default]
    Auto,
    /// Mapped from the container: they start at once and the system may drop them.
    Mmap,
    /// Copied into private memory, in huge pages where the system has them.
    Resident,
    /// As many kept as the budget allows, the rest read again for every token.
    Stream,
}

/// What is asked of a plan.
#[derive(Debug, Clone)]
pub struct Request {
    /// The budget in bytes.
    pub ram: u64,
    /// Where the dense weights are to be.
    pub mode: MemoryMode,
    /// Decoder layers that run.
    pub layers: usize,
    /// Tokens of context of each sequence.
    pub context: usize,
    /// How MLA latents are kept.
    pub kv: KvType,
    /// Sequences that can be open at once.
    pub sequences: usize,
    /// Memory that all of them take besides their states, in bytes.
    pub kept_bytes: u64,
    /// Most rows of a step.
    pub rows: usize,
    /// Activations of dense matrices.
    pub arithmetic: Arithmetic,
    /// Memory for cached experts, in bytes; chosen if `None`.
    pub expert_cache: Option<u64>,
    /// Threads that compute.
    pub threads: usize,
    /// Threads that read.
    pub readers: usize,
    /// Whether kept weights are locked into memory.
    pub lock: bool,
}

/// One line of the plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Part {
    /// What it is.
    pub name: &'static str,
    /// Most bytes it ever takes.
    pub bytes: u64,
}

/// What one decoded token costs once everything is warm.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PerToken {
    /// Bytes of dense weights read from the container.
    pub dense_read: u64,
    /// Bytes of experts read if none were cached.
    pub experts_used: u64,
    /// Bytes of experts that are expected to be read.
    pub experts_read: u64,
    /// Bytes of weights that pass through the cores.
    pub computed: u64,
}

/// Where everything goes.
#[derive(Debug, Clone)]
pub struct MemoryPlan {
    /// The budget in bytes.
    pub ram: u64,
    /// Where the dense weights are; never [`MemoryMode::Auto`].
    pub mode: MemoryMode,
    /// Everything that takes memory, largest uses named.
    pub parts: Vec<Part>,
    /// Placement of the dense matrices.
    pub placement: Placement,
    /// Bytes of all dense matrices, the embedding left out.
    pub dense_bytes: u64,
    /// Bytes of them that are in memory between tokens.
    pub dense_kept: u64,
    /// Slots of the expert cache: for experts that are kept and for those on their way.
    pub slots: usize,
    /// Memory of the cache, in bytes.
    pub cache_bytes: u64,
    /// What a token costs.
    pub per_token: PerToken,
}

impl MemoryPlan {
    /// Plans for `container`.
    ///
    /// # Errors
    /// The budget is too small: lists what is needed and the smallest that works.
    pub fn new(container: &Container, request: &Request) -> anyhow::Result<Self> {
        let matrices = DenseMatrix::all(container, request.layers)?;
        let experts = Experts::new(&container.config, request);
        let mut parts = fixed_parts(container, request)?;
        let fixed: u64 = parts.iter().map(|part| part.bytes).sum();
        let mapped: u64 = matrices.iter().map(DenseMatrix::bytes).sum();
        let all_kept: u64 = matrices.iter().map(|m| kept_bytes(&m.place)).sum();
        let pieces = Pieces::new(&matrices);
        let ring = |keep: &[bool]| (RING_SLOTS * pieces.largest(&matrices, keep)) as u64;
        let nothing_kept = ring(&vec![false; matrices.len()]);
        let least_cache = experts.bytes(experts.least);
        let dense = |mode| match mode {
            MemoryMode::Auto | MemoryMode::Stream => nothing_kept.min(all_kept),
            MemoryMode::Mmap => mapped,
            MemoryMode::Resident => all_kept,
        };
        let least = |mode| fixed + least_cache + dense(mode);
        if request.ram < least(request.mode) {
            let last = [
                Part { name: dense_name(request.mode), bytes: dense(request.mode) },
                Part { name: "expert cache", bytes: least_cache },
            ];
            parts.extend(last);
            return Err(too_small(request, &parts, least(request.mode)).into());
        }
        let mode = match request.mode {
            MemoryMode::Auto if request.ram >= least(MemoryMode::Mmap) => MemoryMode::Mmap,
            MemoryMode::Auto => MemoryMode::Stream,
            mode => mode,
        };
        let keep = match mode {
            MemoryMode::Stream if request.ram >= least(MemoryMode::Resident) => {
                vec![true; matrices.len()]
            }
            MemoryMode::Stream => {
                choose(&matrices, request.ram.saturating_sub(fixed + least_cache + nothing_kept))
            }
            _ => vec![true; matrices.len()],
        };
        let pick = |wanted: bool| matrices.iter().zip(&keep).filter(move |(_, k)| **k == wanted);
        let kept: u64 = match mode {
            MemoryMode::Mmap => mapped,
            _ => pick(true).map(|(m, _)| kept_bytes(&m.place)).sum(),
        };
        parts.push(Part { name: dense_name(mode), bytes: kept });
        if mode == MemoryMode::Stream {
            parts.push(Part { name: "ring of streamed weights", bytes: ring(&keep) });
        }
        let before: u64 = parts.iter().map(|part| part.bytes).sum();
        let slots = experts.slots(request.ram.saturating_sub(before), request.expert_cache);
        let cache_bytes = experts.bytes(slots);
        parts.push(Part { name: "expert cache", bytes: cache_bytes });
        let experts_used = experts.used();
        Ok(Self {
            ram: request.ram,
            mode,
            parts,
            dense_bytes: mapped,
            dense_kept: kept,
            slots,
            cache_bytes: slots as u64 * experts.slot_bytes,
            per_token: PerToken {
                dense_read: pick(false).map(|(m, _)| pieces.read_bytes(m)).sum(),
                experts_used,
                experts_read: (experts_used as f64 * (1.0 - experts.hit_rate(slots))) as u64,
                computed: mapped + experts_used,
            },
            placement: match mode {
                MemoryMode::Mmap => Placement::MAPPED,
                _ => Placement::Loaded { keep, lock: request.lock },
            },
        })
    }

    /// Most bytes the process ever takes.
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    /// The plan in one line.
    pub fn summary(&self) -> String {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        let dense = match self.mode {
            MemoryMode::Auto | MemoryMode::Mmap => {
                format!("{:.2} GB of dense weights mapped", gb(self.dense_bytes))
            }
            MemoryMode::Resident => {
                format!("{:.2} GB of dense weights resident", gb(self.dense_bytes))
            }
            MemoryMode::Stream => format!(
                "{:.2} GB of dense weights streamed for every token, {:.2} GB kept",
                gb(self.per_token.dense_read),
                gb(self.dense_kept)
            ),
        };
        format!(
            "{dense}; {} experts cached ({:.2} GB); at most {:.2} of {:.2} GB",
            self.slots,
            gb(self.cache_bytes),
            gb(self.total()),
            gb(self.ram)
        )
    }
}

fn dense_name(mode: MemoryMode) -> &'static str {
    match mode {
        MemoryMode::Auto => "ring of streamed weights",
        MemoryMode::Mmap => "dense weights, mapped",
        MemoryMode::Resident => "dense weights, resident",
        MemoryMode::Stream => "dense weights, kept",
    }
}

fn too_small(request: &Request, parts: &[Part], least: u64) -> Error {
    let mut terms: Vec<&Part> = parts.iter().collect();
    terms.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    let terms: Vec<_> =
        terms.iter().map(|p| format!("{:>11.1} MB  {}", p.bytes as f64 / 1e6, p.name)).collect();
    let smallest = least.div_ceil(1 << 20);
    let streams = matches!(request.mode, MemoryMode::Auto | MemoryMode::Stream);
    let other = if streams { "" } else { ", or use --memory stream" };
    Error::unsupported(format!(
        "a budget of {:.1} MB is too small; needed are at least\n{}",
        request.ram as f64 / 1e6,
        terms.join("\n")
    ))
    .hint(format!(
        "the smallest that works is --ram {smallest}M{other}; a smaller --context or --chunk needs less"
    ))
}

/// Sizes of the expert cache.
struct Experts {
    slot_bytes: u64,
    expert_bytes: u64,
    layers: usize,
    per_layer: usize,
    top_k: usize,
    least: usize,
}

impl Experts {
    fn new(config: &ModelConfig, request: &Request) -> Self {
        let shape = ExpertShape::new(config);
        let layers = config.moe_layers().end.min(request.layers);
        let layers = layers.saturating_sub(config.moe_layers().start);
        let mut experts = Self {
            slot_bytes: shape.slot_bytes() as u64,
            expert_bytes: shape.bytes() as u64,
            layers,
            per_layer: config.moe.experts,
            top_k: config.moe.top_k,
            least: 1,
        };
        experts.least = match request.expert_cache {
            Some(bytes) => CacheSize::new(config, bytes).slots.min(experts.all()),
            // One token's choice of one layer, so that all of its reads can be under way.
            None => config.moe.top_k.max(1 + IN_FLIGHT).min(experts.all()),
        };
        experts
    }

    /// Experts that can be in the cache at all; the store keeps one in any case.
    fn all(&self) -> usize {
        (self.layers * self.per_layer).max(1)
    }

    fn bytes(&self, slots: usize) -> u64 {
        slots as u64 * (self.slot_bytes + BOOKS_PER_SLOT)
    }

    /// Bytes of the experts one token uses.
    fn used(&self) -> u64 {
        self.layers as u64 * self.top_k as u64 * self.expert_bytes
    }

    /// Slots for `left` bytes: what was asked for, else the least plus whole experts for
    /// every layer, because less is not felt.
    fn slots(&self, left: u64, asked: Option<u64>) -> usize {
        let most = (left / (self.slot_bytes + BOOKS_PER_SLOT)) as usize;
        if asked.is_some() || self.layers == 0 {
            return self.least;
        }
        let kept = most.min(self.all()).saturating_sub(IN_FLIGHT);
        let steps = kept / self.layers * self.layers + IN_FLIGHT;
        if most >= self.all() { self.all() } else { steps.max(self.least) }
    }

    fn hit_rate(&self, slots: usize) -> f64 {
        if self.layers == 0 {
            return 0.0;
        }
        // The others hold experts on their way.
        let kept = if slots == self.all() { slots } else { slots.saturating_sub(IN_FLIGHT) };
        reuse::hit_rate(kept as f64 / self.layers as f64, self.top_k, self.per_layer)
    }
}

/// Everything but dense weights and experts.
fn fixed_parts(container: &Container, request: &Request) -> anyhow::Result<Vec<Part>> {
    let config = &container.config;
    let kda = kda_bytes(config, request.layers);
    let mla = latent_bytes(config, request.layers, request.context, request.kv);
    let sequences = request.sequences as u64;
    let file = |name: &str| container.manifest.file(name).map_or(0, |file| file.size);
    let all_experts = (config.moe_layers().len() * config.moe.experts) as u64;
    let embedding = 2 * (config.hidden as u64 * 2).next_multiple_of(4096);
    Ok(vec![
        Part { name: "KDA state", bytes: kda * sequences },
        Part { name: "MLA cache", bytes: mla * sequences },
        Part { name: "checkpoints and undo records", bytes: request.kept_bytes },
        Part {
            name: "activations",
            bytes: engine::working_bytes(config, request.layers, request.rows, request.arithmetic),
        },
        Part { name: "norms and other vectors", bytes: vectors(container, request.layers)? },
        // The file as read, its tokens, and the table of ids.
        Part { name: "tokenizer", bytes: 3 * file(TOKENIZER_FILE) },
        Part {
            name: "expert table",
            bytes: file(EXPERT_TABLE_FILE) + BOOKS_PER_EXPERT * all_experts,
        },
        Part {
            name: "program and threads",
            bytes: PROGRAM
                + PER_THREAD * (request.threads + request.readers) as u64
                + THREAD_BYTES * request.threads as u64
                + embedding,
        },
    ])
}

/// Bytes of mapped pages that hold norms, taps and other vectors, with what a fault maps
/// around them.
fn vectors(container: &Container, layers: usize) -> k3_formats::Result<u64> {
    let mut total = 0;
    let mut last = (usize::MAX, 0..0);
    for spec in dense_tensors(&container.config) {
        if spec.class != TensorClass::Small && spec.shape.len() != 1
            || spec.layer.is_some_and(|l| l >= layers)
        {
            continue;
        }
        let (file, bytes) = container.tensor_place(&spec.name)?;
        let around = bytes.start / FAULT_AROUND..bytes.end.div_ceil(FAULT_AROUND);
        let fresh = if last.0 == file { around.start.max(last.1.end) } else { around.start };
        total += around.end.saturating_sub(fresh) * FAULT_AROUND;
        last = (file, around);
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release() -> Experts {
        Experts {
            slot_bytes: 17_551_360,
            expert_bytes: 17_547_264,
            layers: 92,
            per_layer: 896,
            top_k: 16,
            least: 16,
        }
    }

    #[test]
    fn the_cache_grows_in_steps_of_one_expert_for_every_layer() {
        let experts = release();
        let each = experts.slot_bytes + BOOKS_PER_SLOT;
        let mut last = 0;
        for gb in 0..1600 {
            let left = gb * 1_000_000_000;
            let slots = experts.slots(left, None);
            let kept = slots - IN_FLIGHT;
            assert!(slots == 16 || kept.is_multiple_of(92) || slots == experts.all(), "{slots}");
            assert!(slots >= last, "more memory is never less cache");
            if slots > 16 {
                let bytes = slots as u64 * each;
                assert!(bytes <= left && left - bytes < 93 * each || slots == experts.all());
            }
            last = slots;
        }
        assert_eq!(last, 92 * 896, "all of them fit 1.45 TB");
        // One token's choice, from which on a plain cache would keep anything: 26 GB.
        let token = experts.slots(26_200_000_000, None);
        assert_eq!(token, 92 * 16 + IN_FLIGHT);
        assert!(experts.hit_rate(token) > 0.29);
    }
}
