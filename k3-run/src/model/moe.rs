//! Latent mixture of experts: a sigmoid router, routed experts in a narrow latent, and
//! the shared experts on the full width.

use half::bf16;
use k3_formats::config::{ModelConfig, MoeConfig};

use crate::dense::{self, Weight};
use crate::experts::{ExpertStore, Loaded};
use crate::kernels::{Activations, Arithmetic};
use crate::linear::{Product, multiply};
use crate::model::mlp::{Mlp, MlpBuffers};
use crate::model::norm::{rms_norm, sigmoid, situ_glu};
use crate::parallel::{Chunks, for_each};
use k3_formats::container::Container;

use super::{Numerics, Views, f32_bytes};

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
    /// What each chosen expert gives, [rows x top_k, latent]: summed in a fixed order when
    /// all are there, whatever order they came in.
    outputs: Vec<f32>,
    /// Chosen experts and their weights, [rows x top_k].
    chosen: Vec<(usize, f32)>,
    order: Vec<usize>,
    needed: Vec<usize>,
    ready: Vec<Loaded>,
    scratch: Activations,
}

/// Memory of one expert on its rows. It is made for each use: experts at work together
/// never have more rows than were chosen, but each of them may have them all.
#[derive(Default)]
struct ExpertWork {
    /// Places in `chosen` that want this expert.
    places: Vec<usize>,
    inputs: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    out: Vec<f32>,
    scratch: Activations,
}

impl MoeBuffers {
    /// Room for `rows` rows.
    pub fn new(rows: usize, config: &ModelConfig, arithmetic: Arithmetic) -> Self {
        let dims = &config.moe;
        Self {
            scores: vec![0.0; rows * dims.experts],
            latent: vec![0.0; rows * dims.latent],
            outputs: vec![0.0; rows * dims.top_k * dims.latent],
            chosen: Vec::with_capacity(rows * dims.top_k),
            order: Vec::with_capacity(dims.experts),
            needed: Vec::with_capacity(dims.experts),
            ready: Vec::with_capacity(dims.experts),
            scratch: Activations::with_room(rows, config.hidden.max(dims.latent), arithmetic),
        }
    }

    /// Bytes reserved, and those that experts at work take for a while.
    pub fn bytes(&self, dims: &MoeConfig) -> u64 {
        let Self { scores, latent, outputs, chosen, order, needed, ready, scratch } = self;
        let lists = chosen.capacity() * size_of::<(usize, f32)>()
            + (order.capacity() + needed.capacity()) * size_of::<usize>()
            + ready.capacity() * size_of::<Loaded>();
        let inputs = Activations::with_room(1, dims.latent.max(dims.inter), Arithmetic::Exact);
        let one = 2 * (dims.latent + dims.inter) * size_of::<f32>();
        let working = (one as u64 + inputs.bytes()) * chosen.capacity() as u64;
        f32_bytes([scores, latent, outputs]) + scratch.bytes() + lists as u64 + working
    }
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

    /// `x`, `out`: [rows, hidden].
    ///
    /// # Errors
    /// An expert cannot be read.
    #[expect(clippy::too_many_arguments, reason = "weights, state and memory of one layer part")]
    pub fn forward(
        &self,
        n: &Numerics,
        x: &[f32],
        (store, container, layer): (&ExpertStore, &Container, usize),
        mlp: &mut MlpBuffers,
        buf: &mut MoeBuffers,
        out: &mut [f32],
        shared_out: &mut [f32],
    ) -> anyhow::Result<()> {
        let d = &self.dims;
        let rows = x.len() / self.router.cols();
        let inter = rows * self.shared.gate.rows();
        let (scores, latent) =
            (&mut buf.scores[..rows * d.experts], &mut buf.latent[..rows * d.latent]);
        let products = [
            (&self.router, scores),
            (&self.down, latent),
            (&self.shared.gate, &mut mlp.gate[..inter]),
            (&self.shared.up, &mut mlp.up[..inter]),
        ];
        dense::multiply(n, x, rows, products, &mut buf.scratch)?;

        self.choose(rows, buf);
        let mut fetch = store.fetch(container, layer, &buf.needed);
        self.shared.finish(n, rows, mlp, shared_out)?;
        loop {
            fetch.ready(&mut buf.ready)?;
            if buf.ready.is_empty() {
                break;
            }
            self.compute(n, buf);
            fetch.give_back(&mut buf.ready);
        }

        let latent = &mut buf.latent[..rows * d.latent];
        sum_outputs(latent, &buf.outputs, &buf.chosen, d);
        latent.chunks_exact_mut(d.latent).for_each(|y| rms_norm(y, self.norm, n.eps));
        dense::multiply(n, latent, rows, [(&self.up, &mut *out)], &mut buf.scratch)?;
        out.iter_mut().zip(shared_out).for_each(|(o, s)| *o += *s);
        Ok(())
    }

    /// Chooses the experts of each row and lists those that any row needs.
    fn choose(&self, rows: usize, buf: &mut MoeBuffers) {
        let d = &self.dims;
        buf.chosen.clear();
        for scores in buf.scores[..rows * d.experts].chunks_exact_mut(d.experts) {
            route(scores, self.bias, d, &mut buf.order, &mut buf.chosen);
        }
        buf.needed.clear();
        buf.needed.extend(buf.chosen.iter().map(|&(e, _)| e));
        buf.needed.sort_unstable();
        buf.needed.dedup();
    }

    /// Runs the experts in `buf.ready` on their rows.
    fn compute(&self, n: &Numerics, buf: &mut MoeBuffers) {
        let d = &self.dims;
        let (count, top_k) = (buf.ready.len(), d.top_k);
        let mut work: Vec<ExpertWork> = (0..count).map(|_| ExpertWork::default()).collect();
        let (ready, chosen, latent) = (&buf.ready, &buf.chosen, &buf.latent);
        for_each((Chunks::new(&mut work, 1), 0..count), 1, |i, (work, _)| {
            let (work, loaded) = (&mut work.into_slice()[0], &ready[i]);
            work.gather(loaded.expert, chosen, latent, top_k, d);
            let rows = work.places.len();
            let mut products = [
                Product::new(loaded.weights.gate(), &mut work.gate, rows),
                Product::new(loaded.weights.up(), &mut work.up, rows),
            ];
            multiply(n.kernels, n.experts, &work.inputs, rows, &mut products, &mut work.scratch);
            situ_glu(&mut work.gate, &work.up, n.situ_beta, n.situ_linear_beta);
            let mut products = [Product::new(loaded.weights.down(), &mut work.out, rows)];
            multiply(n.kernels, n.experts, &work.gate, rows, &mut products, &mut work.scratch);
        });
        for work in work {
            for (out, &place) in work.out.chunks_exact(d.latent).zip(&work.places) {
                buf.outputs[place * d.latent..][..d.latent].copy_from_slice(out);
            }
        }
    }
}

impl ExpertWork {
    fn gather(
        &mut self,
        expert: usize,
        chosen: &[(usize, f32)],
        latent: &[f32],
        top_k: usize,
        d: &MoeConfig,
    ) {
        self.places.clear();
        self.inputs.clear();
        for (place, _) in chosen.iter().enumerate().filter(|(_, c)| c.0 == expert) {
            self.places.push(place);
            self.inputs.extend_from_slice(&latent[place / top_k * d.latent..][..d.latent]);
        }
        let rows = self.places.len();
        self.gate.resize(rows * d.inter, 0.0);
        self.up.resize(rows * d.inter, 0.0);
        self.out.resize(rows * d.latent, 0.0);
    }
}

/// The router's choice for one row: the `top_k` largest of `sigmoid(score) + bias`, lowest
/// id first among equals, NaN never before a number; weights are the plain sigmoids,
/// normalized.
fn route(
    scores: &mut [f32],
    bias: &[f32],
    d: &MoeConfig,
    order: &mut Vec<usize>,
    chosen: &mut Vec<(usize, f32)>,
) {
    scores.iter_mut().for_each(|s| *s = sigmoid(*s));
    let key = |e: usize| {
        let biased = scores[e] + bias[e];
        if biased.is_nan() { f32::NEG_INFINITY } else { biased }
    };
    order.clear();
    order.extend(0..scores.len());
    let by_score = |a: &usize, b: &usize| key(*b).total_cmp(&key(*a)).then(a.cmp(b));
    if d.top_k < order.len() {
        order.select_nth_unstable_by(d.top_k, by_score);
    }
    let best = &mut order[..d.top_k];
    best.sort_unstable_by(by_score);
    let sum: f32 = best.iter().map(|&e| scores[e]).sum();
    chosen.extend(best.iter().map(|&e| (e, scores[e] / (sum + 1e-20) * d.scaling)));
}

/// Weighted sum of each row's experts in the order they were chosen.
fn sum_outputs(latent: &mut [f32], outputs: &[f32], chosen: &[(usize, f32)], d: &MoeConfig) {
    let parts = (Chunks::new(latent, d.latent), 0..chosen.len() / d.top_k);
    for_each(parts, 1, |row, (sum, _)| {
        let sum = sum.into_slice();
        sum.fill(0.0);
        for place in row * d.top_k..(row + 1) * d.top_k {
            let (weight, out) = (chosen[place].1, &outputs[place * d.latent..][..d.latent]);
            sum.iter_mut().zip(out).for_each(|(s, o)| *s += weight * o);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(experts: usize, top_k: usize) -> MoeConfig {
        MoeConfig { experts, top_k, latent: 32, inter: 32, shared_inter: 64, scaling: 1.0 }
    }

    fn choice(scores: &[f32], bias: &[f32], top_k: usize) -> Vec<(usize, f32)> {
        let mut chosen = Vec::new();
        let d = dims(scores.len(), top_k);
        route(&mut scores.to_vec(), bias, &d, &mut Vec::new(), &mut chosen);
        chosen
    }

    #[test]
    fn bias_chooses_but_does_not_weigh() {
        let chosen = choice(&[0.0, 2.0, 0.0], &[0.0, -2.0, 0.5], 2);
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [2, 0]);
        assert!(chosen.iter().all(|c| (c.1 - 0.5).abs() < 1e-6), "{chosen:?}");
    }

    #[test]
    fn ties_go_to_the_lowest_id_and_nan_to_the_last() {
        let chosen = choice(&[1.0, f32::NAN, 1.0, 1.0], &[0.0; 4], 2);
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(choice(&[f32::NAN; 3], &[0.0; 3], 3).len(), 3);
    }
}
