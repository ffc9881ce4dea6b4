//! Dense weights: where each matrix's bytes are, and products with it wherever that is.
//!
//! The layers hold [`Weight`]s and do not know more. A weight is mapped from its file, or
//! kept in private memory, or read again every step into a ring of buffers, always in
//! the order the layers use them. Which one never changes a result: a product is
//! computed row by row, in one region or piece by piece.

use std::path::Path;
use std::sync::Arc;

use k3_formats::container::{Container, MatrixPlace};
use k3_formats::quant::MatrixFormat;
use k3_formats::tensor_name::{TensorClass, dense_tensors};

use crate::experts::OpenShard;
use crate::kernels::{Activations, Forms, Matrix};
use crate::linear::{Product, multiply_prepared};
use crate::model::Numerics;
use crate::parallel::{Columns, Split};

mod cut;
mod embedding;
mod files;
mod loader;
mod placement;
mod populate;
mod ring;

pub(crate) use embedding::Embedding;
pub use placement::{Pieces, Placement, RING_SLOTS, choose, kept_bytes};

use loader::{Kept, Loader, Piece, Shared};
use populate::Populate;

/// A dense matrix `[rows, cols]`, wherever its bytes are.
pub struct Weight<'a> {
    rows: usize,
    cols: usize,
    format: MatrixFormat,
    home: Home<'a>,
}

enum Home<'a> {
    Mapped(Matrix<'a>),
    Kept(Kept),
    /// Pieces of rows, in order.
    Streamed(Arc<Shared>, std::ops::Range<usize>),
}

/// A whole matrix in memory for as long as this lives.
pub enum Held<'w> {
    /// It stays there anyway.
    Here(Matrix<'w>),
    /// In a buffer of the ring, which this gives back.
    Piece(Piece<'w>),
}

impl Held<'_> {
    /// The matrix.
    pub fn matrix(&self) -> Matrix<'_> {
        match self {
            Self::Here(matrix) => *matrix,
            Self::Piece(piece) => piece.matrix(),
        }
    }
}

impl Weight<'_> {
    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The matrix, if it is in memory and stays there.
    pub fn here(&self) -> Option<Matrix<'_>> {
        match &self.home {
            Home::Mapped(matrix) => Some(*matrix),
            Home::Kept(kept) => kept.get(),
            Home::Streamed(..) => None,
        }
    }

    /// Waits for the whole matrix. Only for the matrices that [`Placement`] leaves whole.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn hold(&self) -> anyhow::Result<Held<'_>> {
        Ok(match &self.home {
            Home::Mapped(matrix) => Held::Here(*matrix),
            Home::Kept(kept) => Held::Here(kept.wait()?),
            Home::Streamed(shared, pieces) => {
                assert_eq!(pieces.len(), 1, "a matrix that is left whole");
                Held::Piece(shared.take(pieces.start)?)
            }
        })
    }
}

/// One product for [`multiply`]: `out[t, r] = Σ_c weight[r, c] * x[t, c]`.
pub type DenseProduct<'p, 'a> = (&'p Weight<'a>, &'p mut [f32]);

/// Computes `products`, in the order the layers use their weights, with the inputs
/// `x: [tokens, cols]`, on all threads of the pool it is called in. The outputs are
/// `[tokens, rows]`; `scratch` is reused from call to call.
///
/// # Errors
/// A weight cannot be read.
///
/// # Panics
/// The shapes do not fit.
pub fn multiply<const N: usize>(
    n: &Numerics,
    x: &[f32],
    tokens: usize,
    products: [DenseProduct<'_, '_>; N],
    scratch: &mut Activations,
) -> anyhow::Result<()> {
    let forms = products.iter().map(|(weight, _)| Forms::of_format(weight.format, n.dense));
    scratch.prepare(n.kernels, x, tokens, forms.fold(Forms::default(), |all, one| all | one));
    let run = |products: &mut [Product]| multiply_prepared(n.kernels, n.dense, products, scratch);
    if products.iter().all(|(weight, _)| weight.here().is_some()) {
        let mut products = products.map(|(weight, out)| {
            Product::new(weight.here().expect("it does not go away"), out, tokens)
        });
        run(&mut products);
        return Ok(());
    }
    // What is there goes into one region; the rest comes in the order in which it is read.
    let mut here = Vec::with_capacity(N);
    let mut coming = Vec::with_capacity(N);
    for (weight, out) in products {
        match weight.here() {
            Some(matrix) => here.push(Product::new(matrix, out, tokens)),
            None => coming.push((weight, out)),
        }
    }
    run(&mut here);
    for (weight, out) in coming {
        assert_eq!(out.len(), tokens * weight.rows, "outputs of the matrix");
        match &weight.home {
            Home::Mapped(_) => unreachable!("mapped matrices are always there"),
            Home::Kept(kept) => run(&mut [Product::new(kept.wait()?, out, tokens)]),
            Home::Streamed(shared, pieces) => {
                let mut left = Columns::new(out, tokens);
                for piece in pieces.clone() {
                    let piece = shared.take(piece)?;
                    let (columns, rest) = left.split_at(piece.matrix().rows());
                    run(&mut [Product::of_columns(piece.matrix(), columns)]);
                    left = rest;
                }
            }
        }
    }
    Ok(())
}

/// A matrix of the model and where it lies.
#[derive(Debug, Clone)]
pub struct DenseMatrix {
    /// Full name.
    pub name: String,
    /// Its family.
    pub class: TensorClass,
    /// Where it lies.
    pub place: MatrixPlace,
}

impl DenseMatrix {
    /// The matrices of the first `layers` layers and of the head, in the order a forward
    /// pass uses them; the embedding is read by row and not among them.
    ///
    /// # Errors
    /// The container lacks one.
    pub fn all(container: &Container, layers: usize) -> k3_formats::Result<Vec<Self>> {
        dense_tensors(&container.config)
            .into_iter()
            .filter(|spec| spec.shape.len() == 2 && spec.layer.is_none_or(|l| l < layers))
            .filter(|spec| !matches!(spec.class, TensorClass::Embedding | TensorClass::Small))
            .map(|spec| {
                let place = container.matrix_place(&spec.name)?;
                Ok(Self { name: spec.name, class: spec.class, place })
            })
            .collect()
    }

    /// Bytes of codes and scales.
    pub fn bytes(&self) -> u64 {
        let MatrixPlace { codes, scales, .. } = &self.place;
        (codes.end - codes.start) + (scales.end - scales.start)
    }

    /// Whether only steps that give logits need it.
    fn is_head(&self) -> bool {
        self.class == TensorClass::Head
    }
}

/// The source of all dense weights of a model.
pub struct Dense<'a> {
    container: &'a Container,
    matrices: Vec<DenseMatrix>,
    source: Source,
}

enum Source {
    Mapped(Populate),
    Loaded(Loader),
}

impl<'a> Dense<'a> {
    /// Places the matrices of the first `layers` layers; reads nothing yet. `files` opens the
    /// files of weights that are not mapped.
    ///
    /// # Errors
    /// The container lacks a matrix, or a thread cannot be started.
    ///
    /// # Panics
    /// `placement` was made for another number of layers.
    pub fn new(
        container: &'a Container,
        layers: usize,
        placement: &Placement,
        files: Arc<dyn OpenShard>,
    ) -> anyhow::Result<Self> {
        let matrices = DenseMatrix::all(container, layers)?;
        let source = match placement {
            Placement::Mapped { populate } => {
                Source::Mapped(Populate::new(container, &matrices, *populate))
            }
            Placement::Loaded { keep, lock } => {
                Source::Loaded(Loader::new(container, &matrices, keep, *lock, files)?)
            }
        };
        Ok(Self { container, matrices, source })
    }

    /// The matrices, in the order a forward pass uses them.
    pub fn matrices(&self) -> &[DenseMatrix] {
        &self.matrices
    }

    /// The matrix called `name`.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn weight(&self, name: &str) -> anyhow::Result<Weight<'a>> {
        let stored = self.container.matrix(name)?;
        let home = match &self.source {
            Source::Mapped(_) => Home::Mapped(Matrix::from_bytes(
                stored.format,
                stored.rows,
                stored.cols,
                stored.codes,
                stored.scales,
            )?),
            Source::Loaded(loader) => {
                let number = self.matrices.iter().position(|m| m.name == name);
                loader.home(number.expect("every matrix of a model is listed"))
            }
        };
        Ok(Weight { rows: stored.rows, cols: stored.cols, format: stored.format, home })
    }

    /// Begins to bring the weights in, in the background, unless that was begun; a step does so
    /// too. Calls `then` once mapped ones are there, or others are on their way.
    pub fn prefetch(&mut self, then: impl FnOnce() + Send + 'static) {
        match &mut self.source {
            Source::Mapped(populate) => populate.start(then),
            Source::Loaded(loader) => {
                loader.start();
                then();
            }
        }
    }

    /// To be called before a step; `head` tells whether it wants logits.
    pub(crate) fn begin_step(&mut self, head: bool) {
        match &mut self.source {
            Source::Mapped(populate) => populate.start(|| {}),
            Source::Loaded(loader) => loader.begin_step(head),
        }
    }

    /// To be called after a step that used all its weights.
    pub(crate) fn end_step(&mut self) {
        match &mut self.source {
            Source::Mapped(_) => {}
            Source::Loaded(loader) => loader.end_step(),
        }
    }

    /// Bytes of dense weights read so far, as they were asked of the system; what the
    /// kernel reads for a mapping is not among them.
    pub fn bytes_read(&self) -> u64 {
        match &self.source {
            Source::Mapped(_) => 0,
            Source::Loaded(loader) => loader.bytes_read(),
        }
    }

    /// What the user should know about how the weights are read.
    pub fn notes(&self) -> Vec<String> {
        match &self.source {
            Source::Mapped(_) => Vec::new(),
            Source::Loaded(loader) => loader.notes(),
        }
    }
}

/// A file's last component, for messages.
fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
