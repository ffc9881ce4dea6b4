//! Gated multi-head latent attention without positions, in the absorbed form: keys and
//! values stay in the latent, which is all that is cached.

use half::bf16;
use k3_formats::config::{MlaConfig, ModelConfig};

use crate::dense::{Weight, multiply};
use crate::kernels::{Activations, Arithmetic, Matrix};
use crate::model::norm::{rms_norm, sigmoid};
use crate::parallel::{Chunks, Columns, for_each};
use crate::state::MlaState;

use super::{Numerics, Views, f32_bytes};

/// eps of the two low-rank norms: the release's code leaves them at this default.
pub const LOW_RANK_EPS: f32 = 1e-6;

/// End of the name of the matrix that all heads use at once, a slice each.
pub const LATENT_UP: &str = ".kv_b_proj.weight";

/// Positions scored before the softmax is carried on: fixed, so that results depend on
/// nothing else.
const BLOCK: usize = 64;

/// Weights of an MLA layer.
pub struct Mla<'a> {
    /// Query down-projection [q_lora, hidden], its norm, up-projection [heads x 192, q_lora].
    q_a: Weight<'a>,
    q_norm: &'a [bf16],
    q_b: Weight<'a>,
    /// Latent and shared key [kv_lora + rope, hidden], norm of the latent.
    kv_a: Weight<'a>,
    kv_norm: &'a [bf16],
    /// Per head nope key rows, then value rows: [heads x (nope + v_head), kv_lora].
    kv_b: Weight<'a>,
    /// Output gate [heads x v_head, hidden].
    g: Weight<'a>,
    /// Output projection [hidden, heads x v_head].
    o: Weight<'a>,
    dims: MlaConfig,
}

/// Memory of an MLA layer for a number of rows.
pub struct MlaBuffers {
    q_a: Vec<f32>,
    kv: Vec<f32>,
    q: Vec<f32>,
    gate: Vec<f32>,
    context: Vec<f32>,
    /// Per head: absorbed queries [rows, kv_lora + rope], sums [rows, kv_lora], one
    /// decoded row [kv_lora].
    heads: Vec<f32>,
    scratch: Activations,
}

impl MlaBuffers {
    /// Room for `rows` rows.
    pub fn new(rows: usize, config: &ModelConfig, arithmetic: Arithmetic) -> Self {
        let dims = &config.mla;
        let buffer = |width: usize| vec![0.0; rows * width];
        Self {
            q_a: buffer(dims.q_lora),
            kv: buffer(dims.cache_width()),
            q: buffer(dims.heads * (dims.nope + dims.rope)),
            gate: buffer(dims.width()),
            context: buffer(dims.width()),
            heads: vec![0.0; dims.heads * head_floats(rows, dims)],
            scratch: Activations::with_room(rows, config.hidden.max(dims.width()), arithmetic),
        }
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        let Self { q_a, kv, q, gate, context, heads, scratch } = self;
        f32_bytes([q_a, kv, q, gate, context, heads]) + scratch.bytes()
    }
}

fn head_floats(rows: usize, dims: &MlaConfig) -> usize {
    rows * (dims.cache_width() + dims.kv_lora) + dims.kv_lora
}

impl<'a> Mla<'a> {
    pub(super) fn new(views: &Views<'a, '_>, prefix: &str) -> anyhow::Result<Self> {
        let matrix = |name: &str| views.matrix(&format!("{prefix}.{name}.weight"));
        Ok(Self {
            q_a: matrix("q_a_proj")?,
            q_norm: views.bf16s(&format!("{prefix}.q_a_layernorm.weight"))?,
            q_b: matrix("q_b_proj")?,
            kv_a: matrix("kv_a_proj_with_mqa")?,
            kv_norm: views.bf16s(&format!("{prefix}.kv_a_layernorm.weight"))?,
            kv_b: matrix("kv_b_proj")?,
            g: matrix("g_proj")?,
            o: matrix("o_proj")?,
            dims: views.config().mla.clone(),
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
        runs: impl Iterator<Item = (std::ops::Range<usize>, &'s mut MlaState)>,
        buf: &mut MlaBuffers,
        out: &mut [f32],
    ) -> anyhow::Result<()> {
        let d = &self.dims;
        let rows = x.len() / self.q_a.cols();
        let (q_a, kv) = (&mut buf.q_a[..rows * d.q_lora], &mut buf.kv[..rows * d.cache_width()]);
        let gate = &mut buf.gate[..rows * d.width()];
        let products = [(&self.q_a, q_a), (&self.kv_a, kv), (&self.g, gate)];
        multiply(n, x, rows, products, &mut buf.scratch)?;
        let (q_a, kv) = (&mut buf.q_a[..rows * d.q_lora], &mut buf.kv[..rows * d.cache_width()]);
        q_a.chunks_exact_mut(d.q_lora).for_each(|q| rms_norm(q, self.q_norm, LOW_RANK_EPS));
        for row in kv.chunks_exact_mut(d.cache_width()) {
            rms_norm(&mut row[..d.kv_lora], self.kv_norm, LOW_RANK_EPS);
        }
        let q = &mut buf.q[..rows * self.q_b.rows()];
        multiply(n, q_a, rows, [(&self.q_b, q)], &mut buf.scratch)?;
        let kv_b = self.kv_b.hold()?;
        for (range, state) in runs {
            let new = range.start * d.cache_width()..range.end * d.cache_width();
            state.rows.extend_from_slice(&buf.kv[new]);
            self.attend(range, kv_b.matrix(), state, buf);
        }
        drop(kv_b);
        let context = &buf.context[..rows * d.width()];
        multiply(n, context, rows, [(&self.o, out)], &mut buf.scratch)
    }

    /// All heads over the rows of one sequence, whose latents are already cached.
    fn attend(
        &self,
        range: std::ops::Range<usize>,
        kv_b: Matrix<'_>,
        state: &MlaState,
        buf: &mut MlaBuffers,
    ) {
        let d = &self.dims;
        let (rows, key) = (range.len(), d.nope + d.rope);
        let span = |width: usize| range.start * width..range.end * width;
        let queries = Columns::with_unit(&mut buf.q[span(d.heads * key)], rows, key);
        let context = Columns::with_unit(&mut buf.context[span(d.width())], rows, d.v_head);
        let per_head = head_floats(rows, d);
        let memory = Chunks::new(&mut buf.heads[..d.heads * per_head], per_head);
        let gate = &buf.gate[span(d.width())];
        for_each((queries, context, memory), 1, |head, (mut queries, mut context, memory)| {
            let memory = memory.into_slice();
            let (absorbed, rest) = memory.split_at_mut(rows * d.cache_width());
            let (sums, decoded) = rest.split_at_mut(rows * d.kv_lora);
            let first = head * (d.nope + d.v_head);
            let keys = kv_b.slice_rows(first..first + d.nope);
            let values = kv_b.slice_rows(first + d.nope..first + d.nope + d.v_head);
            self.absorb(keys, &mut queries, absorbed, decoded);
            for t in 0..rows {
                let visible = state.rows.len() / d.cache_width() - (rows - 1 - t);
                let query = &absorbed[t * d.cache_width()..][..d.cache_width()];
                let sum = &mut sums[t * d.kv_lora..][..d.kv_lora];
                attend_one(query, &state.rows[..visible * d.cache_width()], key, sum);
            }
            for r in 0..d.v_head {
                values.decode_row(r, decoded);
                for t in 0..rows {
                    let value = dot(decoded, &sums[t * d.kv_lora..][..d.kv_lora]);
                    let gate = gate[t * d.width() + head * d.v_head + r];
                    context.row_mut(t)[r] = value * sigmoid(gate);
                }
            }
        });
    }

    /// Moves the queries of one head into the latent: `W_uk^T q_nope`, and the shared part
    /// as it is. `absorbed`: [rows, kv_lora + rope].
    fn absorb(
        &self,
        keys: Matrix<'_>,
        queries: &mut Columns,
        absorbed: &mut [f32],
        decoded: &mut [f32],
    ) {
        let d = &self.dims;
        absorbed.fill(0.0);
        for r in 0..d.nope {
            keys.decode_row(r, decoded);
            for (t, row) in absorbed.chunks_exact_mut(d.cache_width()).enumerate() {
                let q = queries.row_mut(t)[r];
                row.iter_mut().zip(&*decoded).for_each(|(a, w)| *a += q * w);
            }
        }
        for (t, row) in absorbed.chunks_exact_mut(d.cache_width()).enumerate() {
            row[d.kv_lora..].copy_from_slice(&queries.row_mut(t)[d.nope..]);
        }
    }
}

/// Softmax attention of one query over all `cached` rows; the sum of latents goes to
/// `sum`. Scores are scaled by `key^-0.5`.
fn attend_one(query: &[f32], cached: &[f32], key: usize, sum: &mut [f32]) {
    let scale = (key as f32).powf(-0.5);
    let (mut max, mut total) = (f32::NEG_INFINITY, 0.0f32);
    sum.fill(0.0);
    for block in cached.chunks(BLOCK * query.len()) {
        let mut scores = [0.0; BLOCK];
        let rows = block.chunks_exact(query.len());
        let scores = &mut scores[..rows.len()];
        for (score, row) in scores.iter_mut().zip(rows.clone()) {
            *score = dot(query, row) * scale;
        }
        let new_max = scores.iter().copied().fold(max, f32::max);
        let shrink = (max - new_max).exp();
        if shrink != 1.0 {
            sum.iter_mut().for_each(|s| *s *= shrink);
            total *= shrink;
        }
        for (score, row) in scores.iter().zip(rows) {
            let weight = (score - new_max).exp();
            total += weight;
            sum.iter_mut().zip(row).for_each(|(s, c)| *s += weight * c);
        }
        max = new_max;
    }
    sum.iter_mut().for_each(|s| *s /= total);
}

/// Dot product in 16 lanes, added up in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for (a, b) in a.chunks(16).zip(b.chunks(16)) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    lanes.iter().sum()
}
