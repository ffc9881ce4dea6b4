//! Kimi delta attention: short convolutions, a gated decay, and the delta rule on a
//! 128 x 128 state per head.

use k3_formats::config::ModelConfig;

use crate::dense::{Weight, multiply};
use crate::kernels::{Activations, Arithmetic, KdaHead, KdaHeadWeights};
use crate::parallel::{Chunks, Columns, for_each};
use crate::state::{KdaInputs, KdaState};

use super::{Numerics, Views, f32_bytes};

/// Weights of a KDA layer; `width` is heads x head_dim.
pub struct Kda<'a> {
    /// q, k, v and gate projections [width, hidden].
    q: Weight<'a>,
    k: Weight<'a>,
    v: Weight<'a>,
    g: Weight<'a>,
    /// Low-rank decay gate: [head_dim, hidden], then [width, head_dim].
    f_a: Weight<'a>,
    f_b: Weight<'a>,
    /// Write strength, [heads, hidden].
    b: Weight<'a>,
    /// Output projection [hidden, width].
    o: Weight<'a>,
    /// Taps of q, k and v, each [width, conv_width], the current token last.
    taps: [&'a [f32]; 3],
    /// [width]
    dt_bias: &'a [f32],
    /// Logarithm of the decay rate; the first `heads` of [head_dim], the rest is padding.
    a_log: &'a [f32],
    /// [head_dim], shared by the heads.
    o_norm: &'a [f32],
}

/// Memory of a KDA layer for a number of rows.
pub struct KdaBuffers {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    g: Vec<f32>,
    decay: Vec<f32>,
    low_rank: Vec<f32>,
    beta: Vec<f32>,
    scratch: Activations,
}

impl KdaBuffers {
    /// Room for `rows` rows of `config`, whose layers read `hidden` columns.
    pub fn new(rows: usize, config: &ModelConfig, arithmetic: Arithmetic) -> Self {
        let hidden = config.hidden;
        let config = &config.kda;
        let wide = || vec![0.0; rows * config.width()];
        Self {
            q: wide(),
            k: wide(),
            v: wide(),
            g: wide(),
            decay: wide(),
            low_rank: vec![0.0; rows * config.head_dim],
            beta: vec![0.0; rows * config.heads],
            scratch: Activations::with_room(rows, hidden.max(config.width()), arithmetic),
        }
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        let Self { q, k, v, g, decay, low_rank, beta, scratch } = self;
        f32_bytes([q, k, v, g, decay, low_rank, beta]) + scratch.bytes()
    }

    fn inputs(&self) -> KdaInputs<'_> {
        let Self { q, k, v, decay, beta, .. } = self;
        KdaInputs { q, k, v, decay, beta }
    }
}

impl<'a> Kda<'a> {
    pub(super) fn new(views: &Views<'a, '_>, prefix: &str) -> anyhow::Result<Self> {
        let matrix = |name: &str| views.matrix(&format!("{prefix}.{name}_proj.weight"));
        let vector = |name: &str| views.f32s(&format!("{prefix}.{name}"));
        Ok(Self {
            q: matrix("q")?,
            k: matrix("k")?,
            v: matrix("v")?,
            g: matrix("g")?,
            f_a: matrix("f_a")?,
            f_b: matrix("f_b")?,
            b: matrix("b")?,
            o: matrix("o")?,
            taps: [
                vector("q_conv1d.weight")?,
                vector("k_conv1d.weight")?,
                vector("v_conv1d.weight")?,
            ],
            dt_bias: vector("dt_bias")?,
            a_log: vector("A_log")?,
            o_norm: vector("o_norm.weight")?,
        })
    }

    /// `x`, `out`: [rows, hidden]. `runs` are consecutive rows of one sequence each.
    ///
    /// # Errors
    /// A weight cannot be read.
    pub fn forward<'s>(
        &self,
        n: &Numerics,
        x: &[f32],
        runs: impl Iterator<Item = (std::ops::Range<usize>, &'s mut KdaState)>,
        buf: &mut KdaBuffers,
        out: &mut [f32],
    ) -> anyhow::Result<()> {
        let heads = self.b.rows();
        let (width, dim) = (self.q.rows(), self.q.rows() / heads);
        let rows = x.len() / self.q.cols();
        let (wide, scratch) = (rows * width, &mut buf.scratch);
        let low_rank = &mut buf.low_rank[..rows * dim];
        let products = [
            (&self.q, &mut buf.q[..wide]),
            (&self.k, &mut buf.k[..wide]),
            (&self.v, &mut buf.v[..wide]),
            (&self.g, &mut buf.g[..wide]),
            (&self.f_a, low_rank),
            (&self.b, &mut buf.beta[..rows * heads]),
        ];
        multiply(n, x, rows, products, scratch)?;
        let products = [(&self.f_b, &mut buf.decay[..wide])];
        multiply(n, &buf.low_rank[..rows * dim], rows, products, scratch)?;
        for (range, state) in runs {
            if let Some(undo) = &mut state.undo {
                let inputs = buf.inputs().rows(buf.beta.len() / heads, range.clone());
                undo.before_step(&state.conv, &mut state.memory, inputs, range.len());
            }
            self.run_heads(n, range, heads, state, buf);
        }
        multiply(n, &buf.q[..wide], rows, [(&self.o, out)], &mut buf.scratch)
    }

    /// Takes `state` back to `position`, which its undo record reaches. On the pool.
    pub fn roll_back(
        &self,
        n: &Numerics,
        position: usize,
        state: &mut KdaState,
        buf: &mut KdaBuffers,
    ) {
        let heads = self.b.rows();
        let Some(mut undo) = state.undo.take() else { return };
        if let Some((inputs, rows)) = undo.rewind(position, &mut state.conv, &mut state.memory) {
            let most = buf.beta.len() / heads;
            for start in (0..rows).step_by(most) {
                let part = start..rows.min(start + most);
                let new = inputs.rows(rows, part.clone());
                let old = [&mut buf.q, &mut buf.k, &mut buf.v, &mut buf.decay, &mut buf.beta];
                for (old, new) in old.into_iter().zip(new.parts()) {
                    old[..new.len()].copy_from_slice(new);
                }
                self.run_heads(n, 0..part.len(), heads, state, buf);
            }
        }
        state.undo = Some(undo);
    }

    /// All heads over the rows of one sequence; leaves the gated output in `buf.q`.
    fn run_heads(
        &self,
        n: &Numerics,
        range: std::ops::Range<usize>,
        heads: usize,
        state: &mut KdaState,
        buf: &mut KdaBuffers,
    ) {
        let (width, rows) = (self.q.rows(), range.len());
        let dim = width / heads;
        let span = range.start * width..range.end * width;
        let [q, k, v, decay, gate] =
            [&mut buf.q, &mut buf.k, &mut buf.v, &mut buf.decay, &mut buf.g]
                .map(|b| Columns::with_unit(&mut b[span.clone()], rows, dim));
        let beta = Columns::new(&mut buf.beta[range.start * heads..range.end * heads], rows);
        let older = self.taps[0].len() / width - 1;
        let [past_q, past_k, past_v] =
            state.conv.each_mut().map(|c| Columns::with_unit(c, older, dim));
        let memory = Chunks::new(&mut state.memory, dim * dim);
        let parts = ((q, k, v), (decay, gate, beta), ((past_q, past_k, past_v), memory));
        for_each(parts, 1, |head, ((q, k, v), (decay, gate, beta), (past, memory))| {
            let columns = head * dim..(head + 1) * dim;
            let taps = columns.start * (older + 1)..columns.end * (older + 1);
            let weights = KdaHeadWeights {
                taps: self.taps.map(|all| &all[taps.clone()]),
                dt_bias: &self.dt_bias[columns],
                rate: self.a_log[head].exp(),
                lower_bound: n.gate_lower_bound,
                o_norm: self.o_norm,
                eps: n.eps,
            };
            let (past, memory) = (past.into(), memory.into_slice());
            n.kernels.kda_head(KdaHead { weights, q, k, v, decay, gate, beta, past, memory });
        });
    }
}
