//! Gated multi-head latent attention without positions, in the absorbed form: keys and
//! values stay in the latent, which is all that is cached.

use half::bf16;
use k3_formats::config::{MlaConfig, ModelConfig};

use crate::dense::{Weight, multiply};
use crate::kernels::{Activations, Arithmetic, Forms, Matrix};
use crate::parallel::{Chunks, Columns, Split, current_threads, for_each};
use crate::state::MlaState;

use super::{Numerics, Views, f32_bytes};

/// eps of the two low-rank norms: the release's code leaves them at this default.
pub const LOW_RANK_EPS: f32 = 1e-6;

/// End of the name of the matrix that all heads use at once, a slice each.
pub const LATENT_UP: &str = ".kv_b_proj.weight";

/// Most heads that a thread takes over the cache together.
const HEADS: usize = 32;

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
    /// Queries in the latent, [rows, heads, kv_lora + rope].
    absorbed: Vec<f32>,
    /// Sums of latents, [heads, rows, kv_lora].
    sums: Vec<f32>,
    /// The same of each head as inputs of its value rows.
    latents: Vec<Activations>,
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
            absorbed: buffer(dims.heads * dims.cache_width()),
            sums: buffer(dims.heads * dims.kv_lora),
            latents: (0..dims.heads)
                .map(|_| Activations::with_room(rows, dims.kv_lora, Arithmetic::Exact))
                .collect(),
            scratch: Activations::with_room(rows, config.hidden.max(dims.width()), arithmetic),
        }
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        let Self { q_a, kv, q, gate, context, absorbed, sums, latents, scratch } = self;
        let inputs = latents.iter().chain([scratch]).map(Activations::bytes).sum::<u64>();
        f32_bytes([q_a, kv, q, gate, context, absorbed, sums]) + inputs
    }
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
        n.kernels.rms_norm(q_a, self.q_norm, LOW_RANK_EPS);
        for row in kv.chunks_exact_mut(d.cache_width()) {
            n.kernels.rms_norm(&mut row[..d.kv_lora], self.kv_norm, LOW_RANK_EPS);
        }
        let q = &mut buf.q[..rows * self.q_b.rows()];
        multiply(n, q_a, rows, [(&self.q_b, q)], &mut buf.scratch)?;
        let kv_b = self.kv_b.hold()?;
        for (range, state) in runs {
            let new = range.start * d.cache_width()..range.end * d.cache_width();
            state.rows.push(&buf.kv[new]);
            self.attend(n, range, kv_b.matrix(), state, buf);
        }
        drop(kv_b);
        let context = &buf.context[..rows * d.width()];
        multiply(n, context, rows, [(&self.o, out)], &mut buf.scratch)
    }

    /// All heads over the rows of one sequence, whose latents are already cached; leaves
    /// the gated values in `buf.context`.
    fn attend(
        &self,
        n: &Numerics,
        range: std::ops::Range<usize>,
        kv_b: Matrix<'_>,
        state: &MlaState,
        buf: &mut MlaBuffers,
    ) {
        let d = &self.dims;
        let (rows, key, width) = (range.len(), d.nope + d.rope, d.cache_width());
        let span = |width: usize| range.start * width..range.end * width;
        let absorbed = &mut buf.absorbed[..rows * d.heads * width];
        let sums = &mut buf.sums[..rows * d.heads * d.kv_lora];

        let queries = Columns::with_unit(&mut buf.q[span(d.heads * key)], rows, key);
        let parts = (queries, Columns::with_unit(absorbed, rows, width));
        for_each(parts, 1, |head, (queries, absorbed)| {
            let first = head * (d.nope + d.v_head);
            let keys = kv_b.slice_rows(first..first + d.nope);
            let (queries, shared) = queries.split_columns(d.nope);
            let (latents, mut keys_out) = absorbed.split_columns(d.kv_lora);
            n.kernels.matmul_transposed(&keys, &queries, latents);
            for t in 0..rows {
                keys_out.row_mut(t).copy_from_slice(shared.row(t));
            }
        });

        let scale = (key as f32).powf(-0.5);
        let cached = state.rows.len() / width - rows;
        let parts =
            (Columns::with_unit(absorbed, rows, width), Chunks::new(sums, rows * d.kv_lora));
        // Heads share what they read of the cache, so a part has as many as leave every
        // thread some.
        let grain = d.heads.div_ceil(2 * current_threads()).min(HEADS);
        for_each(parts, grain, |_, (mut queries, sums)| {
            let heads = queries.items();
            let sums = sums.into_slice();
            for t in 0..rows {
                let queries = Columns::new(queries.row_mut(t), heads);
                let (_, sums) = Columns::new(sums, heads).split_columns(t * d.kv_lora);
                let (mut sums, _) = sums.split_columns(d.kv_lora);
                let cache = state.rows.first((cached + t + 1) * width);
                n.kernels.attend(&queries, cache, scale, &mut sums);
            }
        });

        let context = Columns::with_unit(&mut buf.context[span(d.width())], rows, d.v_head);
        let gate = Columns::with_unit(&mut buf.gate[span(d.width())], rows, d.v_head);
        let sums = Chunks::new(sums, rows * d.kv_lora);
        let parts = ((context, gate), (sums, Chunks::new(&mut buf.latents, 1)));
        for_each(parts, 1, |head, ((mut context, gate), (sums, latents))| {
            let first = head * (d.nope + d.v_head) + d.nope;
            let values = kv_b.slice_rows(first..first + d.v_head);
            let latents = &mut latents.into_slice()[0];
            let forms = Forms::of(&values, Arithmetic::Exact);
            latents.prepare(n.kernels, sums.into_slice(), rows, forms);
            n.kernels.matmul(&values, Arithmetic::Exact, latents, context.reborrow());
            for t in 0..rows {
                n.kernels.gate(context.row_mut(t), gate.row(t));
            }
        });
    }
}
