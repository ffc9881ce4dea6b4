//! A container: the folder that `k3-prep convert` writes and `k3-run` maps.
//!
//! Opening reads the manifest and the config, maps the dense files and the expert
//! table, and checks names, shapes and bounds once. It hashes nothing, converts nothing
//! and touches no matrix.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;

use crate::config::ModelConfig;
use crate::expert_table::ExpertTable;
use crate::mapping::Mapping;
use crate::quant::MatrixFormat;
use crate::safetensors_header::{Header, MAX_HEADER};
use crate::tensor_name::{TensorSpec, dense_tensors};
use crate::{Error, Result};

pub mod layout;
pub mod manifest;
pub mod writer;

pub use manifest::Manifest;

/// File name of the expert table.
pub const EXPERT_TABLE_FILE: &str = "experts.k3x";

/// File name of the prepared tokenizer.
pub const TOKENIZER_FILE: &str = "tokenizer.bin";

/// Ending of the sidecar tensor that holds a matrix's scales.
pub const SCALES_SUFFIX: &str = ".qs";

/// The dense file a tensor goes to: one for the embedding, one per layer, one for the head.
pub fn dense_file_name(spec: &TensorSpec) -> String {
    match spec.layer {
        Some(layer) => format!("dense-layer-{layer:03}.safetensors"),
        None if spec.class == crate::tensor_name::TensorClass::Embedding => {
            "dense-embed.safetensors".into()
        }
        None => "dense-head.safetensors".into(),
    }
}

/// How a spec is stored: the tensors it becomes in its dense file, matrix first.
pub fn stored_tensors(spec: &TensorSpec, format: Option<MatrixFormat>) -> Vec<layout::Placed> {
    use layout::{MATRIX_ALIGN, Placed, VECTOR_ALIGN};
    let name = spec.name.clone();
    let is_matrix = matches!(spec.shape[..], [rows, _] if rows > 1);
    let align = if is_matrix { MATRIX_ALIGN } else { VECTOR_ALIGN };
    let (format, rows, cols) = match (format, spec.matrix_dims()) {
        (Some(format), Some((rows, cols))) if format != MatrixFormat::Bf16 => (format, rows, cols),
        _ => return vec![Placed { name, dtype: spec.dtype, shape: spec.shape.clone(), align }],
    };
    let scales = match format.scales_per_row(cols) {
        1 => vec![rows],
        n => vec![rows, n],
    };
    let sidecar = format!("{name}{SCALES_SUFFIX}");
    let codes = vec![rows, format.code_bytes_per_row(cols)];
    vec![
        Placed { name, dtype: Dtype::U8, shape: codes, align: MATRIX_ALIGN },
        Placed { name: sidecar, dtype: format.scale_dtype(), shape: scales, align: VECTOR_ALIGN },
    ]
}

/// A dense matrix in place: `[rows, cols]` weights as codes and scales.
#[derive(Debug, Clone, Copy)]
pub struct StoredMatrix<'a> {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// How codes and scales are to be read.
    pub format: MatrixFormat,
    /// Codes, row after row; on a page boundary.
    pub codes: &'a [u8],
    /// Scales of the format's type, row after row; empty for BF16.
    pub scales: &'a [u8],
}

/// Where a dense matrix lies, for readers that do not map it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatrixPlace {
    /// Number of its file among [`Container::dense_files`].
    pub file: usize,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// How codes and scales are to be read.
    pub format: MatrixFormat,
    /// Bytes of the codes in the file, row after row; begin on a page.
    pub codes: Range<u64>,
    /// Bytes of the scales in the file, row after row; empty for BF16.
    pub scales: Range<u64>,
}

/// One dense file, open and mapped.
#[derive(Debug)]
pub struct DenseFile {
    /// Where it is.
    pub path: PathBuf,
    /// All of it.
    pub map: Arc<Mapping>,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    file: usize,
    begin: usize,
    end: usize,
}

/// An open container.
#[derive(Debug)]
pub struct Container {
    /// The folder.
    pub dir: PathBuf,
    /// What it says of itself.
    pub manifest: Manifest,
    /// The model.
    pub config: ModelConfig,
    /// Where the experts are.
    pub experts: ExpertTable<MappedBytes>,
    files: Vec<DenseFile>,
    places: HashMap<String, (Place, Option<MatrixFormat>, TensorSpec)>,
    scales: HashMap<String, Place>,
}

/// A mapping as plain bytes.
#[derive(Debug)]
pub struct MappedBytes(Mapping);

impl AsRef<[u8]> for MappedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Container {
    /// Opens and checks a container; reads no tensor data.
    ///
    /// # Errors
    /// Names the file and the tensor that is absent, has another size or another shape.
    pub fn open(dir: &Path) -> Result<Self> {
        let manifest = Manifest::read(dir)?;
        let config = ModelConfig::read(&dir.join("config.json"))?;
        let sizes: Vec<u64> = manifest.shards.iter().map(|s| s.size).collect();
        let table_path = dir.join(EXPERT_TABLE_FILE);
        let table = MappedBytes(Mapping::open(&table_path)?);
        let experts =
            ExpertTable::new(table, &config, &sizes).map_err(|e| e.in_file(&table_path))?;
        let mut container = Self {
            dir: dir.to_path_buf(),
            manifest,
            config,
            experts,
            files: Vec::new(),
            places: HashMap::new(),
            scales: HashMap::new(),
        };
        container.map_dense_files()?;
        Ok(container)
    }

    fn map_dense_files(&mut self) -> Result<()> {
        let mut found = HashMap::new();
        let mut specs: Vec<(String, TensorSpec)> = Vec::new();
        for spec in dense_tensors(&self.config) {
            specs.push((dense_file_name(&spec), spec));
        }
        for name in specs.iter().map(|(file, _)| file) {
            if !found.contains_key(name) {
                let path = self.dir.join(name);
                let opened = self.open_dense(name).map_err(|e| e.in_file(&path))?;
                found.insert(name.clone(), opened);
            }
        }
        let formats = self.recorded_formats()?;
        for (file, spec) in specs {
            let (number, tensors) = &found[&file];
            let format = formats.get(&spec.name).copied();
            for placed in stored_tensors(&spec, format) {
                let place = tensors
                    .get(&placed.name)
                    .filter(|t| t.1 == placed.dtype && t.2 == placed.shape)
                    .map(|t| Place { file: *number, ..t.0 })
                    .filter(|p| (p.begin as u64).is_multiple_of(placed.align))
                    .ok_or_else(|| {
                        Error::mismatch(format!(
                            "expected {} {:?} on a multiple of {} bytes",
                            placed.dtype, placed.shape, placed.align
                        ))
                        .item(placed.name.clone())
                        .in_file(self.dir.join(&file))
                        .hint("the container is damaged; convert the snapshot again")
                    })?;
                if placed.name == spec.name {
                    self.places.insert(placed.name, (place, format, spec.clone()));
                } else {
                    self.scales.insert(spec.name.clone(), place);
                }
            }
        }
        Ok(())
    }

    fn recorded_formats(&self) -> Result<HashMap<String, MatrixFormat>> {
        let tensors = self.manifest.files.iter().flat_map(|f| &f.tensors);
        tensors
            .filter_map(|t| t.format.as_deref().map(|format| (t, format)))
            .map(|(t, format)| {
                let known = MatrixFormat::from_name(format).ok_or_else(|| {
                    Error::unsupported(format!("unknown number format {format:?}"))
                        .item(t.name.clone())
                        .in_file(self.dir.join(manifest::MANIFEST_FILE))
                })?;
                Ok((t.name.clone(), known))
            })
            .collect()
    }

    fn open_dense(&mut self, name: &str) -> Result<(usize, HashMap<String, Tensor>)> {
        let path = self.dir.join(name);
        let map = Mapping::open(&path)?;
        let size = map.len() as u64;
        let damaged = || {
            Error::malformed("not a safetensors file")
                .hint("the container is damaged; convert the snapshot again")
        };
        let recorded = self.manifest.file(name).map(|f| f.size);
        if recorded != Some(size) {
            return Err(Error::mismatch(format!(
                "expected {} bytes, found {size}",
                recorded.unwrap_or(0)
            ))
            .hint("the container is damaged; convert the snapshot again"));
        }
        let word = map.first_chunk::<8>().ok_or_else(damaged)?;
        let length = u64::from_le_bytes(*word);
        if length > MAX_HEADER || length > size - 8 {
            return Err(damaged());
        }
        let length = usize::try_from(length).map_err(|_| damaged())?;
        let header = Header::parse(&map[8..8 + length], size)?;
        let number = self.files.len();
        self.files.push(DenseFile { path, map: Arc::new(map) });
        // The header was checked against the size of the mapping, so these fit a usize.
        let at = |offset: u64| (header.data_start + offset) as usize;
        let tensors = header.tensors.iter().map(|t| {
            let place = Place { file: number, begin: at(t.begin), end: at(t.end) };
            (t.name.clone(), (place, t.dtype, t.shape.clone()))
        });
        Ok((number, tensors.collect()))
    }

    fn bytes(&self, place: Place) -> &[u8] {
        &self.files[place.file].map[place.begin..place.end]
    }

    fn place(&self, name: &str) -> Result<&(Place, Option<MatrixFormat>, TensorSpec)> {
        self.places.get(name).ok_or_else(|| {
            Error::missing("the config implies no such tensor").item(name).in_file(&self.dir)
        })
    }

    /// A matrix in place, quantized or BF16.
    ///
    /// # Errors
    /// The config implies no such tensor, or it is no matrix.
    pub fn matrix(&self, name: &str) -> Result<StoredMatrix<'_>> {
        let MatrixPlace { rows, cols, format, file, codes, scales } = self.matrix_place(name)?;
        // Checked against the mapping when it was opened, so these fit a usize.
        let bytes =
            |range: Range<u64>| &self.files[file].map[range.start as usize..range.end as usize];
        Ok(StoredMatrix { rows, cols, format, codes: bytes(codes), scales: bytes(scales) })
    }

    /// Where a matrix lies.
    ///
    /// # Errors
    /// The config implies no such tensor, or it is no matrix.
    pub fn matrix_place(&self, name: &str) -> Result<MatrixPlace> {
        let (place, format, spec) = self.place(name)?;
        let [rows, cols] = spec.shape[..] else {
            return Err(Error::mismatch("not a matrix").item(name).in_file(&self.dir));
        };
        Ok(MatrixPlace {
            file: place.file,
            rows,
            cols,
            format: format.unwrap_or(MatrixFormat::Bf16),
            codes: place.begin as u64..place.end as u64,
            scales: match self.scales.get(name) {
                Some(scales) => scales.begin as u64..scales.end as u64,
                None => 0..0,
            },
        })
    }

    /// The dense files, in the order a forward pass uses them.
    pub fn dense_files(&self) -> &[DenseFile] {
        &self.files
    }

    /// Bytes of the file that hold the vector or matrix `name`, codes only.
    ///
    /// # Errors
    /// The config implies no such tensor.
    pub fn tensor_place(&self, name: &str) -> Result<(usize, Range<u64>)> {
        let (place, ..) = self.place(name)?;
        Ok((place.file, place.begin as u64..place.end as u64))
    }

    /// A BF16 vector in place.
    ///
    /// # Errors
    /// The config implies no such tensor, or it is not BF16.
    pub fn bf16s(&self, name: &str) -> Result<&[half::bf16]> {
        self.typed(name, Dtype::BF16).map(bytemuck::cast_slice)
    }

    /// An F32 vector in place.
    ///
    /// # Errors
    /// The config implies no such tensor, or it is not F32.
    pub fn f32s(&self, name: &str) -> Result<&[f32]> {
        self.typed(name, Dtype::F32).map(bytemuck::cast_slice)
    }

    fn typed(&self, name: &str, dtype: Dtype) -> Result<&[u8]> {
        let (place, format, spec) = self.place(name)?;
        if spec.dtype != dtype || format.is_some_and(|f| f != MatrixFormat::Bf16) {
            let problem = format!("expected {dtype}, found another type");
            return Err(Error::mismatch(problem).item(name).in_file(&self.dir));
        }
        Ok(self.bytes(*place))
    }

    /// A tensor's bytes as they are stored: codes of a quantized matrix, else its values.
    ///
    /// # Errors
    /// The config implies no such tensor.
    pub fn stored_bytes(&self, name: &str) -> Result<&[u8]> {
        self.place(name).map(|(place, ..)| self.bytes(*place))
    }

    /// Bytes of all dense files.
    pub fn dense_bytes(&self) -> u64 {
        self.files.iter().map(|f| f.map.len() as u64).sum()
    }
}

type Tensor = (Place, Dtype, Vec<usize>);
