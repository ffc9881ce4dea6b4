//! What the rounds add up to.

use serde::Serialize;

use k3_formats::tensor_name::TensorClass;

use super::products::Shape;
use super::steps::Steps;
use super::{Decoded, IN_FLIGHT, Round, Spread};
use crate::clock::Part;
use crate::engine::Engine;
use crate::experts::{ExpertStore, LookAheadStats};

/// All measurements. Rates are per second, sizes in bytes, times in seconds.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub(super) cpu: String,
    pub(super) threads: usize,
    pub(super) kernels: &'static str,
    pub(super) layers: usize,
    pub(super) dense_bytes: u64,
    pub(super) expert_bytes: usize,
    pub(super) rounds: usize,
    pub(super) memory: Spread,
    /// Multiply-adds.
    pub(super) peak_f32: Spread,
    pub(super) peak_int8: Spread,
    pub(super) direct_io: bool,
    pub(super) disk: Vec<Disk>,
    /// Rows of the inputs of a product of a chunk.
    pub(super) chunk: usize,
    pub(super) products: Vec<Product>,
    pub(super) decode: Vec<Decode>,
    pub(super) prefill: Vec<Prefill>,
}

/// Reads of whole experts.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Disk {
    pub(super) in_flight: usize,
    pub(super) rate: Spread,
}

/// Products at one shape.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Product {
    #[serde(flatten)]
    pub(super) shape: Shape,
    /// Bytes of weights with one row of inputs.
    pub(super) rate: Spread,
    /// The same as a part of the memory's rate in the same round.
    pub(super) of_memory: Spread,
    /// Bytes of weights with one row of inputs on one thread.
    pub(super) one_thread_rate: Spread,
    /// Multiply-adds with a chunk of rows.
    pub(super) chunk_rate: Spread,
    /// The same as a part of the peak of its arithmetic in the same round.
    pub(super) of_peak: Spread,
}

/// Decoding one token at a time.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Decode {
    /// Experts that are kept.
    pub(super) kept: usize,
    /// Seconds of a token, over all tokens of all rounds.
    pub(super) seconds: Spread,
    /// Bytes of weights a token uses.
    pub(super) bytes: f64,
    /// Bytes of experts read for a token.
    pub(super) bytes_read: f64,
    pub(super) hit_rate: f64,
    /// A round's median as a multiple of the larger of two times: bytes used at the
    /// memory's rate, bytes read at the drive's rate just before and after.
    pub(super) of_limit: Spread,
    pub(super) disk_busy: Spread,
    pub(super) look_ahead: LookAhead,
    pub(super) parts: Vec<PartShare>,
}

/// What the look-ahead was good for, for a token.
#[derive(Debug, Clone, Serialize)]
pub(super) struct LookAhead {
    pub(super) begun: f64,
    pub(super) used: f64,
    pub(super) wasted_bytes: f64,
    /// Part of the guesses of each rank that were right, best rank first.
    pub(super) right_by_rank: Vec<f64>,
}

/// Taking a prompt in.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Prefill {
    pub(super) tokens: usize,
    /// Tokens.
    pub(super) rate: Spread,
    /// Multiply-adds in matrices.
    pub(super) work: Spread,
    pub(super) bytes_read: f64,
    pub(super) parts: Vec<PartShare>,
}

/// One part's share of the time, 0 to 1.
#[derive(Debug, Clone, Serialize)]
pub(super) struct PartShare {
    pub(super) part: &'static str,
    pub(super) share: f64,
}

fn shares<'s>(steps: impl Iterator<Item = &'s Steps> + Clone) -> Vec<PartShare> {
    let total: f64 = steps.clone().map(Steps::total).sum();
    let share = |part: Part| {
        let time: f64 = steps.clone().map(|s| s.parts[part as usize].as_secs_f64()).sum();
        PartShare { part: part.name(), share: time / total }
    };
    Part::ALL.into_iter().map(share).collect()
}

fn spread(values: impl Iterator<Item = f64>) -> Spread {
    Spread::of(values).expect("at least one round")
}

impl Report {
    pub(super) fn new(
        engine: &Engine<'_>,
        uncached: &ExpertStore,
        shapes: &[Shape],
        rounds: &[Round],
        prompts: &[usize],
    ) -> Self {
        let dense_bytes = engine.dense().matrices().iter().map(|matrix| matrix.bytes()).sum();
        let expert_bytes = engine.experts().expert_bytes();
        let of = |value: &dyn Fn(&Round) -> f64| spread(rounds.iter().map(value));
        let disk = |(i, in_flight)| Disk { in_flight, rate: of(&|r| r.disk[i]) };
        let decode = |i: usize, store: &ExpertStore| {
            decode(rounds, |r| &r.decode[i], store.size().experts, dense_bytes, expert_bytes)
        };
        Self {
            cpu: cpu(),
            threads: engine.threads(),
            kernels: engine.numerics().kernels.name(),
            layers: engine.model().layers.len(),
            dense_bytes,
            expert_bytes,
            rounds: rounds.len(),
            memory: of(&|r| r.memory),
            peak_f32: of(&|r| r.peak.f32),
            peak_int8: of(&|r| r.peak.int8),
            direct_io: engine.experts().is_direct(),
            disk: IN_FLIGHT.into_iter().enumerate().map(disk).collect(),
            chunk: engine.max_rows(),
            products: (0..shapes.len())
                .map(|i| product(rounds, i, shapes[i], engine.max_rows()))
                .collect(),
            decode: vec![decode(0, engine.experts()), decode(1, uncached)],
            prefill: (0..prompts.len()).map(|i| prefill(engine, rounds, i, prompts[i])).collect(),
        }
    }
}

fn product(rounds: &[Round], i: usize, shape: Shape, chunk: usize) -> Product {
    let rate = |r: &Round| shape.bytes as f64 / r.products[i].one;
    let one_thread = |r: &Round| shape.bytes as f64 / r.products[i].one_thread;
    let work = (shape.rows * shape.cols * chunk) as f64;
    let chunk_rate = |r: &Round| work / r.products[i].chunk;
    let peak = |r: &Round| if shape.act8 { r.peak.int8 } else { r.peak.f32 };
    Product {
        shape,
        rate: spread(rounds.iter().map(rate)),
        of_memory: spread(rounds.iter().map(|r| rate(r) / r.memory)),
        one_thread_rate: spread(rounds.iter().map(one_thread)),
        chunk_rate: spread(rounds.iter().map(chunk_rate)),
        of_peak: spread(rounds.iter().map(|r| chunk_rate(r) / peak(r))),
    }
}

fn decode(
    rounds: &[Round],
    pick: impl Fn(&Round) -> &Decoded + Copy,
    kept: usize,
    dense_bytes: u64,
    expert_bytes: usize,
) -> Decode {
    let all = rounds.iter().map(|r| &pick(r).steps);
    let tokens: f64 = all.clone().map(|s| s.seconds.len() as f64).sum();
    let per_token =
        |value: &dyn Fn(&Steps) -> u64| all.clone().map(|s| value(s) as f64).sum::<f64>() / tokens;
    let used = per_token(&|s| s.experts.hits + s.experts.misses);
    let bytes = dense_bytes as f64 + used * expert_bytes as f64;
    let of_limit = rounds.iter().map(|r| {
        let Decoded { steps, disk } = pick(r);
        let read = steps.experts.bytes_read as f64 / steps.seconds.len() as f64;
        let limit = (bytes / r.memory).max(read / disk);
        spread(steps.seconds.iter().copied()).median / limit
    });
    let guess =
        |value: &dyn Fn(&LookAheadStats) -> u64| per_token(&|s| value(&s.experts.look_ahead));
    let ranks = rounds.first().map_or(0, |r| pick(r).steps.experts.look_ahead.ranks.len());
    let right = |rank: usize| {
        let guessed = guess(&|l| l.ranks[rank].guessed);
        (guessed > 0.0).then(|| guess(&|l| l.ranks[rank].right) / guessed)
    };
    Decode {
        kept,
        seconds: spread(all.clone().flat_map(|s| s.seconds.iter().copied())),
        bytes,
        bytes_read: per_token(&|s| s.experts.bytes_read),
        hit_rate: per_token(&|s| s.experts.hits) / used,
        of_limit: spread(of_limit),
        disk_busy: spread(all.clone().map(|s| s.disk_busy)),
        look_ahead: LookAhead {
            begun: guess(&|l| l.begun),
            used: guess(&|l| l.used),
            wasted_bytes: guess(&|l| l.wasted_bytes),
            right_by_rank: (0..ranks).map_while(right).collect(),
        },
        parts: shares(all),
    }
}

fn prefill(engine: &Engine<'_>, rounds: &[Round], i: usize, tokens: usize) -> Prefill {
    let all = rounds.iter().map(|r| &r.prefill[i]);
    let moe = &engine.model().config.moe;
    let layers = engine.model().config.moe_layers();
    let layers = layers.start.min(engine.model().layers.len())..engine.model().layers.len();
    let routed = layers.len() * moe.top_k * 3 * moe.latent * moe.inter;
    let mut work = (tokens * routed) as f64;
    for matrix in engine.dense().matrices() {
        // Only the last row of a prompt gives logits.
        let rows = if matrix.class == TensorClass::Head { 1 } else { tokens };
        work += (matrix.place.rows * matrix.place.cols * rows) as f64;
    }
    let read: f64 = all.clone().map(|s| s.experts.bytes_read as f64).sum();
    Prefill {
        tokens,
        rate: spread(all.clone().map(|s| tokens as f64 / s.total())),
        work: spread(all.clone().map(|s| work / s.total())),
        bytes_read: read / rounds.len() as f64,
        parts: shares(all),
    }
}

/// What the processor calls itself.
fn cpu() -> String {
    let text = fs_err::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or(std::env::consts::ARCH, |(_, name)| name).trim().to_owned()
}
