//! What a conversion will write: a pure function of the snapshot's headers, its small
//! files and the recipe. It can be printed, tested and executed; executing decides nothing.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k3_formats::calibration::Calibration;
use k3_formats::config::ModelConfig;
use k3_formats::container::layout::Layout;
use k3_formats::container::manifest::{FORMAT_VERSION, FileRecord, Manifest, ShardRecord};
use k3_formats::container::{EXPERT_TABLE_FILE, TOKENIZER_FILE, dense_file_name, stored_tensors};
use k3_formats::quant::{MatrixFormat, Scales};
use k3_formats::recipe::Recipe;
use k3_formats::snapshot::{Snapshot, Source};
use k3_formats::tensor_name::{TensorSpec, dense_tensors};
use k3_formats::tokenizer::{CHAT_TOKENS, Tokenizer};
use k3_formats::{Error, Result, json, text_file};

use crate::inventory::Inventory;
use crate::problems::Problems;
use crate::tokenizer_check::check_with_tiktoken;
use crate::tokenizer_json::tokenizer_json;

mod summary;

pub use summary::{ClassTotals, PlanSummary};

/// Longest small file that is copied, in bytes; the release's have a few thousand.
const MAX_SMALL: u64 = 4 << 20;

/// The tokenizer once more, for other programs; the runtime does not read it.
const TOKENIZER_JSON: &str = "tokenizer.json";

/// Small files of the snapshot that go along; the second says whether they must be there.
const COPIED: [(&str, bool); 3] =
    [("config.json", true), ("generation_config.json", false), ("tokenizer_config.json", true)];

/// Everything that a conversion will write.
#[derive(Debug)]
pub struct ConversionPlan {
    /// How the matrices are quantized.
    pub recipe: Recipe,
    /// The model.
    pub config: ModelConfig,
    /// Repository and revision, where the layout tells.
    pub source: Source,
    /// Absolute path of the snapshot's folder.
    pub snapshot: PathBuf,
    /// The source shards, and what they were when the plan was made.
    pub shards: Vec<ShardRecord>,
    /// Where each of them is.
    pub shard_paths: Vec<PathBuf>,
    /// The dense files in execution order.
    pub dense: Vec<DenseFile>,
    /// The other files, in the order the manifest lists them.
    pub small: Vec<SmallFile>,
    /// Tensors that a text runtime does not need.
    pub left_out: Vec<String>,
    /// Experts whose six tensors are not one run.
    pub scattered_experts: usize,
    /// What is odd, but no obstacle.
    pub warnings: Vec<String>,
}

/// One dense file to be written.
#[derive(Debug)]
pub struct DenseFile {
    /// Name in the container.
    pub name: String,
    /// Header and offsets.
    pub layout: Layout,
    /// Its tensors in file order; a quantized one becomes two of the layout's.
    pub tensors: Vec<PlannedTensor>,
}

impl DenseFile {
    /// Bytes to read for it.
    pub fn source_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.spec.bytes()).sum()
    }
}

/// One tensor of the snapshot and what becomes of it.
#[derive(Debug)]
pub struct PlannedTensor {
    /// Name, type and shape.
    pub spec: TensorSpec,
    /// The format it is quantized to, or `None` if it passes through unchanged.
    pub format: Option<MatrixFormat>,
    /// Number of its shard.
    pub shard: usize,
    /// Offset of its data in the shard file.
    pub offset: u64,
    /// What each column's error counts, where the recipe searches scales.
    pub importance: Option<Arc<[f32]>>,
}

/// A file whose bytes are known when the plan is made.
#[derive(Debug)]
pub struct SmallFile {
    /// Name in the container.
    pub name: &'static str,
    /// Contents.
    pub bytes: Vec<u8>,
}

impl ConversionPlan {
    /// Plans the conversion of a snapshot.
    ///
    /// # Errors
    /// Lists everything that is missing or unfit; nothing has been written.
    pub fn new(snapshot: &Snapshot, recipe: &Recipe) -> Result<Self> {
        Self::calibrated(snapshot, recipe, None)
    }

    /// As [`ConversionPlan::new`], for recipes that weigh errors by `calibration`.
    ///
    /// # Errors
    /// Also when the recipe needs a calibration and this is none, or another.
    pub fn calibrated(
        snapshot: &Snapshot,
        recipe: &Recipe,
        calibration: Option<&Calibration>,
    ) -> Result<Self> {
        let mut problems = Problems::default();
        let inventory = Inventory::take(snapshot, &mut problems);
        let (small, nameless) = small_files(snapshot, &mut problems);
        let what = format!("{} cannot be converted", snapshot.dir.display());
        let Some(inventory) = inventory else {
            return Err(problems.into_error(&what).expect("an inventory fails with a problem"));
        };
        if let Some(error) = problems.into_error(&what) {
            return Err(error);
        }
        let scattered_experts = inventory.experts.scattered();
        let table = inventory.experts.encode(inventory.shards.len());
        let mut all_small = vec![SmallFile { name: EXPERT_TABLE_FILE, bytes: table }];
        all_small.extend(small);
        Ok(Self {
            recipe: recipe.clone(),
            config: snapshot.config.clone(),
            source: snapshot.source(),
            snapshot: absolute(&snapshot.dir)?,
            shards: inventory.shards,
            shard_paths: snapshot.shards.iter().map(|s| s.path.clone()).collect(),
            dense: dense_files(inventory.dense, recipe, calibration)?,
            small: all_small,
            left_out: inventory.vision,
            scattered_experts,
            warnings: inventory.warnings.into_iter().chain(nameless).collect(),
        })
    }

    /// Plans the dense files whose tensors are all in the shards that are marked in `ready`;
    /// the plan knows nothing of small files, experts and the other shards.
    ///
    /// # Errors
    /// As [`ConversionPlan::calibrated`], of what is there.
    pub(crate) fn of_ready(
        snapshot: &Snapshot,
        ready: &[bool],
        recipe: &Recipe,
        calibration: Option<&Calibration>,
    ) -> Result<Self> {
        let mut problems = Problems::default();
        let inventory = Inventory::of_ready(snapshot, ready, &mut problems);
        let what = format!("{} cannot be converted", snapshot.dir.display());
        let Some(inventory) = inventory else {
            return Err(problems.into_error(&what).expect("an inventory fails with a problem"));
        };
        let placed: HashSet<&str> = inventory.dense.iter().map(|d| d.0.name.as_str()).collect();
        let all = dense_tensors(&snapshot.config);
        let open = all.iter().filter(|spec| !placed.contains(spec.name.as_str()));
        let open: HashSet<String> = open.map(dense_file_name).collect();
        let mut dense = inventory.dense;
        dense.retain(|(spec, ..)| !open.contains(&dense_file_name(spec)));
        Ok(Self {
            recipe: recipe.clone(),
            config: snapshot.config.clone(),
            source: snapshot.source(),
            snapshot: absolute(&snapshot.dir)?,
            shards: inventory.shards,
            shard_paths: snapshot.shards.iter().map(|s| s.path.clone()).collect(),
            dense: dense_files(dense, recipe, calibration)?,
            small: Vec::new(),
            left_out: Vec::new(),
            scattered_experts: 0,
            warnings: Vec::new(),
        })
    }

    /// The manifest of the finished container, given the records of its files.
    pub fn manifest(&self, files: Vec<FileRecord>) -> Manifest {
        Manifest {
            format_version: FORMAT_VERSION,
            tool: crate::TOOL.to_owned(),
            recipe: self.recipe.clone(),
            source: self.source.clone(),
            snapshot: self.snapshot.to_str().unwrap_or_default().to_owned(),
            shards: self.shards.clone(),
            files,
            left_out: self.left_out.clone(),
        }
    }

    /// The bytes of the expert table.
    pub(crate) fn expert_table(&self) -> &[u8] {
        let table = self.small.iter().find(|file| file.name == EXPERT_TABLE_FILE);
        table.map_or(&[], |file| &file.bytes)
    }

    /// Bytes of all files, the manifest and the sums not counted.
    pub fn output_bytes(&self) -> u64 {
        let dense: u64 = self.dense.iter().map(|f| f.layout.file_size()).sum();
        dense + self.small.iter().map(|f| f.bytes.len() as u64).sum::<u64>()
    }

    /// Bytes of dense tensors to be read.
    pub fn source_bytes(&self) -> u64 {
        self.dense.iter().map(DenseFile::source_bytes).sum()
    }
}

/// Whether a container has a file of this name whose bytes the plan knows.
pub(crate) fn is_small_file(name: &str) -> bool {
    [EXPERT_TABLE_FILE, TOKENIZER_FILE, TOKENIZER_JSON].contains(&name)
        || COPIED.iter().any(|c| c.0 == name)
}

/// The path with links resolved, so that it means the same from another working folder.
fn absolute(dir: &Path) -> Result<PathBuf> {
    fs_err::canonicalize(dir).map_err(|e| Error::io(dir, "resolve", e))
}

fn dense_files(
    tensors: Vec<(TensorSpec, usize, u64)>,
    recipe: &Recipe,
    calibration: Option<&Calibration>,
) -> Result<Vec<DenseFile>> {
    let mut importances = Importances { recipe, calibration, equal: Vec::new() };
    let mut files: Vec<(String, Vec<PlannedTensor>)> = Vec::new();
    for (spec, shard, offset) in tensors {
        let name = dense_file_name(&spec);
        // BF16 is how a matrix already is: nothing is done to it.
        let format = recipe.format_of(&spec).filter(|&f| f != MatrixFormat::Bf16);
        let importance = if format.is_some() { importances.of(&spec)? } else { None };
        let tensor = PlannedTensor { spec, format, shard, offset, importance };
        match files.last_mut() {
            Some((last, tensors)) if *last == name => tensors.push(tensor),
            _ => files.push((name, vec![tensor])),
        }
    }
    let file = |(name, tensors): (String, Vec<PlannedTensor>)| {
        let placed: Vec<_> =
            tensors.iter().flat_map(|t| stored_tensors(&t.spec, t.format)).collect();
        Ok(DenseFile { layout: Layout::new(&placed)?, name, tensors })
    };
    files.into_iter().map(file).collect()
}

/// What the errors of columns count, by matrix.
struct Importances<'a> {
    recipe: &'a Recipe,
    calibration: Option<&'a Calibration>,
    /// All columns alike, one for each width there is.
    equal: Vec<Arc<[f32]>>,
}

impl Importances<'_> {
    fn of(&mut self, spec: &TensorSpec) -> Result<Option<Arc<[f32]>>> {
        let Some((_, cols)) = spec.matrix_dims() else { return Ok(None) };
        match self.recipe.scales() {
            Scales::Absmax => Ok(None),
            Scales::Mse => {
                let equal = self.equal.iter().find(|equal| equal.len() == cols).cloned();
                Ok(Some(equal.unwrap_or_else(|| {
                    let equal: Arc<[f32]> = vec![1.0; cols].into();
                    self.equal.push(equal.clone());
                    equal
                })))
            }
            Scales::Hessian => {
                let hint = "give --calibration FILE, as formats/README.md describes it";
                let given = self.calibration.filter(|c| {
                    self.recipe.calibration().is_none_or(|recorded| recorded == c.sha256)
                });
                let Some(calibration) = given else {
                    let problem = match self.calibration {
                        None => "hessian scales need a calibration file",
                        Some(_) => "not the calibration file that the recipe was used with",
                    };
                    return Err(Error::missing(problem).hint(hint));
                };
                calibration.importance(&spec.name, cols).map(|i| Some(i.into()))
            }
        }
    }
}

/// The small files, and what is odd about them.
fn small_files(snapshot: &Snapshot, problems: &mut Problems) -> (Vec<SmallFile>, Option<String>) {
    let (mut files, mut nameless) = (Vec::new(), None);
    match tokenizer_files(snapshot) {
        Ok((made, warning)) => {
            files.extend(made);
            nameless = warning;
        }
        Err(error) => problems.add(&error.hint("the snapshot is incomplete; download it again")),
    }
    for (name, required) in COPIED {
        let path = snapshot.file(name);
        match text_file::downloaded_bytes(&path, MAX_SMALL) {
            Ok(bytes) => match is_json(&bytes) {
                Ok(()) => files.push(SmallFile { name, bytes }),
                Err(error) => problems.add(&error.in_file(path)),
            },
            Err(_) if !required && path.symlink_metadata().is_err() => {}
            // The tokenizer's reader has named it already.
            Err(_) if name == "tokenizer_config.json" => {}
            Err(error) => problems.add(&error.hint("download the file again")),
        }
    }
    (files, nameless)
}

/// Files that a runtime will read must be what it can read.
fn is_json(bytes: &[u8]) -> Result<()> {
    let text = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
    match json::parse(text) {
        Ok(_) => Ok(()),
        Err(e) => Err(Error::malformed(format!("not valid JSON: {e}"))
            .hint("the file is damaged or incomplete; download it again")),
    }
}

/// The files made from the tokenizer, and a warning if it cannot hold a conversation.
fn tokenizer_files(snapshot: &Snapshot) -> Result<([SmallFile; 2], Option<String>)> {
    let tokenizer = Tokenizer::from_snapshot_files(
        &snapshot.file("tiktoken.model"),
        &snapshot.file("tokenizer_config.json"),
        snapshot.config.base_vocab(),
    )
    .map_err(|e| e.hint("download tiktoken.model and tokenizer_config.json again"))?;
    check_with_tiktoken(&tokenizer).map_err(|e| e.in_file(snapshot.file("tiktoken.model")))?;
    let nameless = CHAT_TOKENS.iter().filter(|name| tokenizer.special_id(name).is_none());
    let nameless: Vec<_> = nameless.copied().collect();
    let warning = (!nameless.is_empty()).then(|| {
        format!(
            "tokenizer_config.json does not name {}: k3-run cannot chat or serve with this container",
            nameless.join(", ")
        )
    });
    let files = [
        SmallFile { name: TOKENIZER_FILE, bytes: tokenizer.write_prepared() },
        SmallFile { name: TOKENIZER_JSON, bytes: tokenizer_json(&tokenizer) },
    ];
    Ok((files, warning))
}
