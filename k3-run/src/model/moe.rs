//! Latent mixture of experts: a sigmoid router, routed experts in a narrow latent, and
//! the shared experts on the full width.

use std::sync::atomic::{AtomicBool, Ordering};

use half::bf16;
use k3_formats::config::{ModelConfig, MoeConfig};
use k3_formats::container::Container;

use crate::clock::{Clock, Part};
use crate::dense::{self, Weight};
use crate::engine::Cancelled;
use crate::experts::{ExpertStore, FetchLists, Loaded, RANKS};
use crate::kernels::{Activations, Arithmetic, Forms};
use crate::linear::{Product, multiply, multiply_prepared};
use crate::model::mlp::{Mlp, MlpBuffers, situ_rows};
use crate::parallel::{Chunks, Split, for_each, join};

use super::{Numerics, Views, f32_bytes};

mod routing;

use routing::{Choices, Rule, route};

/// Rows of experts that are computed together: what their activations need is bounded
/// by this, or by the rows of the step.
const BATCH_ROWS: usize = 512;

/// Most rows of a step that guesses: more of them, as in a chunk of a prompt, leave the
/// disk no idle time.
const GUESS_ROWS: usize = 8;

/// Weights of a MoE layer but for its routed experts.
pub struct Moe<'a> {
    /// Router [experts, hidden].
    router: Weight<'a>,
    /// Added to the scores for the choice only, [experts].
    bias: &'a [f32],
    /// Into the latent [latent, hidden] and back [hidden, latent].
    down: Weight<'a>,
    up: Weight<'a>,
    /// Norm of the experts' sum, [latent].
    norm: &'a [bf16],
    shared: Mlp<'a>,
    dims: MoeConfig,
}

/// Memory of a MoE layer for a number of rows.
pub struct MoeBuffers {
    scores: Vec<f32>,
    latent: Vec<f32>,
    choices: Choices,
    /// What each expert gives for each of its rows, [places, latent]: summed in a fixed
    /// order when all are there, whatever order they came in.
    outputs: Vec<f32>,
    scratch: Activations,
    lists: FetchLists,
    ready: Vec<Loaded>,
    batch: BatchBuffers,
}

/// Memory of the experts that are computed together.
struct BatchBuffers {
    /// Rows there is room for.
    rows: usize,
    /// Inputs [rows, latent], gathered if the step has several rows.
    gathered: Vec<f32>,
    /// The one row that all experts read, if the step has one.
    latent: Activations,
    /// [rows, inter]
    gate: Vec<f32>,
    up: Vec<f32>,
    /// One for each expert.
    scratch: Vec<Activations>,
}

impl MoeBuffers {
    /// Room for `rows` rows of a step; `arithmetic` is that of dense matrices.
    pub fn new(rows: usize, config: &ModelConfig, arithmetic: Arithmetic) -> Self {
        let dims = &config.moe;
        let places = rows * dims.top_k;
        let batch = places.min(BATCH_ROWS.max(rows));
        // Few enough experts for their scratch to hold no more than some batches.
        let experts = (BATCH_ROWS / rows).max(4).min(dims.experts).min(places);
        // Enough for either arithmetic of the experts: of the two f32 forms they need one.
        let scratch = |rows, cols| Activations::with_room(rows, cols, Arithmetic::Exact);
        Self {
            scores: vec![0.0; rows * dims.experts],
            latent: vec![0.0; rows * dims.latent],
            choices: Choices::new(rows, dims),
            outputs: vec![0.0; places * dims.latent],
            scratch: Activations::with_room(rows, config.hidden.max(dims.latent), arithmetic),
            lists: FetchLists::default(),
            ready: Vec::with_capacity(experts),
            batch: BatchBuffers {
                rows: batch,
                gathered: vec![0.0; if rows > 1 { batch * dims.latent } else { 0 }],
                latent: scratch(1, dims.latent),
                gate: vec![0.0; batch * dims.inter],
                up: vec![0.0; batch * dims.inter],
                scratch: (0..experts).map(|_| scratch(rows, dims.latent.max(dims.inter))).collect(),
            },
        }
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        let Self { scores, latent, choices, outputs, scratch, lists: _, ready, batch } = self;
        let BatchBuffers { rows: _, gathered, latent: one, gate, up, scratch: each } = batch;
        let scratch: u64 = each.iter().chain([scratch, one]).map(Activations::bytes).sum();
        f32_bytes([scores, latent, outputs, gathered, gate, up])
            + scratch
            + choices.bytes()
            + (ready.capacity() * size_of::<Loaded>()) as u64
    }
}

/// What a MoE layer needs beside its weights and its memory.
pub struct MoeStep<'s, 'a> {
    /// How numbers are computed.
    pub numerics: &'s Numerics,
    /// Where the routed experts come from.
    pub experts: &'s ExpertStore,
    /// Where their places are.
    pub container: &'s Container,
    /// Number of this layer.
    pub layer: usize,
    /// The next layer, if it has experts.
    pub next: Option<&'s Moe<'a>>,
    /// Set when the step is to be given up.
    pub cancel: &'s AtomicBool,
}

impl<'a> Moe<'a> {
    pub(super) fn new(views: &Views<'a, '_>, prefix: &str) -> anyhow::Result<Self> {
        let matrix = |name: &str| views.matrix(&format!("{prefix}.{name}.weight"));
        Ok(Self {
            router: matrix("gate")?,
            bias: views.f32s(&format!("{prefix}.gate.e_score_correction_bias"))?,
            down: matrix("routed_expert_down_proj")?,
            up: matrix("routed_expert_up_proj")?,
            norm: views.bf16s(&format!("{prefix}.routed_expert_norm.weight"))?,
            shared: Mlp::new(views, &format!("{prefix}.shared_experts"))?,
            dims: views.config().moe.clone(),
        })
    }

    /// `x`, `out`, `shared_out`: [rows, hidden].
    ///
    /// # Errors
    /// An expert cannot be read, or the step is to be given up.
    #[expect(clippy::too_many_arguments, reason = "step, input, memory and output of one part")]
    pub fn forward(
        &self,
        step: &MoeStep<'_, '_>,
        x: &[f32],
        mlp: &mut MlpBuffers,
        buf: &mut MoeBuffers,
        clock: &mut Clock,
        out: &mut [f32],
        shared_out: &mut [f32],
    ) -> anyhow::Result<()> {
        let (n, d) = (step.numerics, &self.dims);
        let rows = x.len() / self.router.cols();
        let MoeBuffers { scores, latent, choices, outputs, scratch, lists, ready, batch } = buf;
        let (scores, latent) = (&mut scores[..rows * d.experts], &mut latent[..rows * d.latent]);

        // The router alone, so that the disk has something to do during all the rest.
        dense::multiply(n, x, rows, [(&self.router, &mut *scores)], scratch)?;
        choices.choose(self.rule(n), scores);
        let mut fetch = step.experts.fetch(step.container, step.layer, choices.needed(), lists);
        guess(step, x, rows, scores, scratch)?;
        clock.lap(Part::Router, step.layer);

        let inter = rows * self.shared.gate.rows();
        let products = [
            (&self.down, &mut *latent),
            (&self.shared.gate, &mut mlp.gate[..inter]),
            (&self.shared.up, &mut mlp.up[..inter]),
        ];
        dense::multiply(n, x, rows, products, scratch)?;
        clock.lap(Part::Dense, step.layer);

        let most = batch.scratch.len();
        fetch.ready(ready, most, false)?;
        let mut finished = Ok(());
        join(
            || finished = self.shared.finish(n, rows, mlp, shared_out),
            || self.compute(n, latent, choices, ready, batch, outputs),
        );
        let part = if ready.is_empty() { Part::Dense } else { Part::Experts };
        clock.lap(part, step.layer);
        fetch.give_back(ready);
        finished?;
        loop {
            if step.cancel.load(Ordering::Relaxed) {
                return Err(Cancelled.into());
            }
            fetch.ready(ready, most, true)?;
            if ready.is_empty() {
                break;
            }
            clock.lap(Part::Wait, step.layer);
            self.compute(n, latent, choices, ready, batch, outputs);
            fetch.give_back(ready);
            clock.lap(Part::Experts, step.layer);
        }

        choices.sum(n.kernels, latent, outputs, d.latent);
        for_each(Chunks::new(latent, d.latent), 1, |_, y| {
            n.kernels.rms_norm(y.into_slice(), self.norm, n.eps);
        });
        dense::multiply(n, latent, rows, [(&self.up, &mut *out)], scratch)?;
        out.iter_mut().zip(shared_out).for_each(|(o, s)| *o += *s);
        clock.lap(Part::Dense, step.layer);
        Ok(())
    }

    fn rule<'s>(&'s self, n: &Numerics) -> Rule<'s> {
        Rule { kernels: n.kernels, bias: self.bias, dims: &self.dims, top_p: n.expert_top_p }
    }

    /// Runs the experts in `ready` on their rows.
    fn compute(
        &self,
        n: &Numerics,
        latent: &[f32],
        choices: &Choices,
        ready: &mut [Loaded],
        buf: &mut BatchBuffers,
        outputs: &mut [f32],
    ) {
        let d = &self.dims;
        ready.sort_unstable_by_key(|loaded| loaded.expert);
        let one = latent.len() == d.latent;
        if let (true, Some(first)) = (one, ready.first()) {
            let forms = Forms::of(&first.weights.gate(), n.experts);
            buf.latent.prepare(n.kernels, latent, 1, forms);
        }
        let mut rest = &*ready;
        while !rest.is_empty() {
            let mut rows = 0;
            let fit = rest.iter().take_while(|loaded| {
                rows += choices.rows(loaded.expert).len();
                rows <= buf.rows
            });
            let (experts, after) = rest.split_at(fit.count());
            rest = after;
            let first = choices.places(experts[0].expert).start;
            let batch = Batch {
                experts,
                choices,
                d,
                first,
                outputs: &mut outputs[first * d.latent..],
                gathered: &mut buf.gathered,
                gate: &mut buf.gate,
                up: &mut buf.up,
                scratch: &mut buf.scratch,
            };
            let shared = one.then_some(&buf.latent);
            for_each(batch, 1, |_, expert| expert.compute(n, latent, shared));
        }
    }
}

/// Guesses the experts of the layer after an FFN of any kind from its input
/// `x: [rows, hidden]`, and begins to read the best ones, if it is worth it.
///
/// # Errors
/// A weight cannot be read.
pub fn guess_next(
    step: &MoeStep<'_, '_>,
    x: &[f32],
    rows: usize,
    buf: &mut MoeBuffers,
) -> anyhow::Result<()> {
    let MoeBuffers { scores, scratch, .. } = buf;
    guess(step, x, rows, scores, scratch)
}

fn guess(
    step: &MoeStep<'_, '_>,
    x: &[f32],
    rows: usize,
    scores: &mut [f32],
    scratch: &mut Activations,
) -> anyhow::Result<()> {
    let few = rows <= GUESS_ROWS;
    // A router that is itself read from disk must wait for its turn.
    let Some(next) = step.next.filter(|next| few && next.router.here().is_some()) else {
        return Ok(());
    };
    let (n, layer, d) = (step.numerics, step.layer + 1, &next.dims);
    let width = step.experts.look_ahead(layer);
    if width.is_none() {
        return Ok(());
    }
    let scores = &mut scores[..rows * d.experts];
    dense::multiply(n, x, rows, [(&next.router, &mut *scores)], scratch)?;
    let mut picks = [[(0, 0.0); RANKS]; GUESS_ROWS];
    let (picks, ranks) = (&mut picks[..rows], d.top_k.min(RANKS));
    for (scores, picks) in scores.chunks_exact_mut(d.experts).zip(&mut *picks) {
        route(next.rule(n), scores, &mut picks[..ranks]);
    }
    // The best of all rows, then the second best.
    let picks = &*picks;
    let ranked = (0..ranks).flat_map(|rank| picks.iter().map(move |row| row[rank].0 as usize));
    step.experts.read_early(step.container, layer, ranked, rows, width);
    Ok(())
}

/// Some experts with what they need, in the order of their places.
struct Batch<'s> {
    experts: &'s [Loaded],
    choices: &'s Choices,
    d: &'s MoeConfig,
    /// The place that `outputs` begins with.
    first: usize,
    outputs: &'s mut [f32],
    gathered: &'s mut [f32],
    gate: &'s mut [f32],
    up: &'s mut [f32],
    scratch: &'s mut [Activations],
}

impl Split for Batch<'_> {
    fn items(&self) -> usize {
        self.experts.len()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let Self { experts, choices, d, first, outputs, gathered, gate, up, scratch } = self;
        let (left, right) = experts.split_at(mid);
        let rows: usize = left.iter().map(|loaded| choices.rows(loaded.expert).len()).sum();
        let next = right.first().map_or(first, |loaded| choices.places(loaded.expert).start);
        let outputs = outputs.split_at_mut((next - first) * d.latent);
        let gathered = gathered.split_at_mut((rows * d.latent).min(gathered.len()));
        let gate = gate.split_at_mut(rows * d.inter);
        let up = up.split_at_mut(rows * d.inter);
        let scratch = scratch.split_at_mut(mid);
        let half = |experts, first, outputs, gathered, gate, up, scratch| Batch {
            experts,
            choices,
            d,
            first,
            outputs,
            gathered,
            gate,
            up,
            scratch,
        };
        (
            half(left, first, outputs.0, gathered.0, gate.0, up.0, scratch.0),
            half(right, next, outputs.1, gathered.1, gate.1, up.1, scratch.1),
        )
    }
}

impl Batch<'_> {
    /// `out <- down(situ(gate x, up x))` for the one expert left; `shared` is its input if
    /// the step has a single row, which is all of `latent`.
    fn compute(self, n: &Numerics, latent: &[f32], shared: Option<&Activations>) {
        let (d, expert) = (self.d, &self.experts[0]);
        let (weights, scratch) = (&expert.weights, &mut self.scratch[0]);
        let rows = self.choices.rows(expert.expert);
        let (gate, up) =
            (&mut self.gate[..rows.len() * d.inter], &mut self.up[..rows.len() * d.inter]);
        let mut products = [
            Product::new(weights.gate(), gate, rows.len()),
            Product::new(weights.up(), up, rows.len()),
        ];
        if let Some(x) = shared {
            multiply_prepared(n.kernels, n.experts, &mut products, x);
        } else {
            let gathered = &mut self.gathered[..rows.len() * d.latent];
            for (x, &row) in gathered.chunks_exact_mut(d.latent).zip(rows) {
                x.copy_from_slice(&latent[row as usize * d.latent..][..d.latent]);
            }
            multiply(n.kernels, n.experts, gathered, rows.len(), &mut products, scratch);
        }
        situ_rows(n, gate, up);
        let out = &mut self.outputs[..rows.len() * d.latent];
        let mut products = [Product::new(weights.down(), out, rows.len())];
        multiply(n.kernels, n.experts, gate, rows.len(), &mut products, scratch);
    }
}
