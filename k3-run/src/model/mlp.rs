//! Dense FFN and shared experts: `down(situ(gate x, up x))`.

use k3_formats::config::ModelConfig;

use crate::dense::{Weight, multiply};
use crate::kernels::{Activations, Arithmetic, Situ};
use crate::parallel::{Chunks, for_each};

use super::{Numerics, Views, f32_bytes};

/// Weights of a SiTU FFN.
pub struct Mlp<'a> {
    /// Gate projection [inter, hidden].
    pub gate: Weight<'a>,
    /// Up projection [inter, hidden].
    pub up: Weight<'a>,
    /// Down projection [hidden, inter].
    pub down: Weight<'a>,
}

/// Memory of an FFN for a number of rows.
pub struct MlpBuffers {
    /// [rows, inter]
    pub gate: Vec<f32>,
    /// [rows, inter]
    pub up: Vec<f32>,
    scratch: Activations,
}

impl MlpBuffers {
    /// Room for `rows` rows of the widest FFN.
    pub fn new(rows: usize, config: &ModelConfig, arithmetic: Arithmetic) -> Self {
        let inter = config.dense_inter.max(config.moe.shared_inter);
        let buffer = || vec![0.0; rows * inter];
        let scratch = Activations::with_room(rows, config.hidden.max(inter), arithmetic);
        Self { gate: buffer(), up: buffer(), scratch }
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        f32_bytes([&self.gate, &self.up]) + self.scratch.bytes()
    }
}

impl<'a> Mlp<'a> {
    pub(super) fn new(views: &Views<'a, '_>, prefix: &str) -> anyhow::Result<Self> {
        let matrix = |name: &str| views.matrix(&format!("{prefix}.{name}_proj.weight"));
        Ok(Self { gate: matrix("gate")?, up: matrix("up")?, down: matrix("down")? })
    }

    /// `out <- down(situ(gate x, up x))`; `x`, `out`: [rows, hidden].
    ///
    /// # Errors
    /// A weight cannot be read.
    pub fn forward(
        &self,
        n: &Numerics,
        x: &[f32],
        rows: usize,
        buf: &mut MlpBuffers,
        out: &mut [f32],
    ) -> anyhow::Result<()> {
        let width = rows * self.gate.rows();
        let (gate, up) = (&mut buf.gate[..width], &mut buf.up[..width]);
        multiply(n, x, rows, [(&self.gate, gate), (&self.up, up)], &mut buf.scratch)?;
        self.finish(n, rows, buf, out)
    }

    /// The second half, from gate and up projections already in `buf`.
    ///
    /// # Errors
    /// A weight cannot be read.
    pub fn finish(
        &self,
        n: &Numerics,
        rows: usize,
        buf: &mut MlpBuffers,
        out: &mut [f32],
    ) -> anyhow::Result<()> {
        let width = rows * self.gate.rows();
        situ_rows(n, &mut buf.gate[..width], &buf.up[..width]);
        multiply(n, &buf.gate[..width], rows, [(&self.down, out)], &mut buf.scratch)
    }
}

/// SiTU over all elements, spread over the pool.
pub fn situ_rows(n: &Numerics, gate: &mut [f32], up: &[f32]) {
    /// Elements of one part: some microseconds.
    const PART: usize = 2048;
    let situ = Situ { beta: n.situ_beta, linear_beta: n.situ_linear_beta };
    let len = gate.len();
    for_each((Chunks::new(gate, 1), 0..len), PART, |_, (gate, range)| {
        n.kernels.situ_glu(situ, gate.into_slice(), &up[range]);
    });
}
