//! Is a container still what was written, and does it still belong to its snapshot?
//!
//! Nothing stops at the first difference: each check adds what it finds, and all of it is
//! named. Checks that need more than the container are asked for one by one.

use std::path::{Path, PathBuf};

use k3_formats::calibration::Calibration;
use k3_formats::container::manifest::{FileRecord, MANIFEST_FILE, Manifest, SUMS_FILE};
use k3_formats::container::{Container, EXPERT_TABLE_FILE, TOKENIZER_FILE, dense_file_name};
use k3_formats::digest::Digest;
use k3_formats::quant::MatrixFormat;
use k3_formats::tensor_name::dense_tensors;
use k3_formats::{Error, ErrorKind, Result, text_file};
use rayon::ThreadPool;
use serde::Serialize;

use crate::problems::Lines;
use crate::progress::Talk;

mod banks;
mod experts;
mod files;
mod published;
mod rederive;
pub(crate) mod shards;

pub use rederive::Sample;

/// Longest text file of a container that is read whole, in bytes.
const MAX_TEXT: u64 = 64 << 20;

/// What to check.
pub struct Verification<'a> {
    /// The container.
    pub dir: &'a Path,
    /// Folders with the shards; empty for the one the manifest names.
    pub snapshots: &'a [PathBuf],
    /// Hash whole shards and compare with published digests.
    pub source: bool,
    /// Read all experts and compare with their checksums.
    pub experts: bool,
    /// Quantize sampled rows again.
    pub rederive: Option<Sample>,
    /// What the conversion weighed errors by, to quantize again what it did.
    pub calibration: Option<&'a Calibration>,
    /// Whether to say how far it is.
    pub talk: Talk,
    /// Threads that hash.
    pub pool: &'a ThreadPool,
}

/// What was checked and what was found.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Whether there is no difference.
    pub ok: bool,
    /// What is not as it should be, each naming its file and tensor.
    pub differences: Vec<String>,
    /// What is worth knowing, but no difference.
    pub notes: Vec<String>,
    /// Files of the container that were hashed.
    pub files: usize,
    /// Bytes of those.
    pub bytes: u64,
    /// Tensors that were hashed.
    pub tensors: usize,
    /// Shards whose size and header are what they were.
    pub shards: usize,
    /// Shards of the manifest.
    pub all_shards: usize,
    /// Outcome of `--source`.
    pub source: Option<SourceReport>,
    /// Outcome of `--experts`.
    pub experts: Option<ExpertsReport>,
    /// The banks, where a folder with a pack was given.
    pub banks: Option<BanksReport>,
    /// Outcome of `--rederive`.
    pub rederived: Option<RederiveReport>,
}

/// How much of the source could be compared with published digests.
#[derive(Debug, Default, Serialize)]
pub struct SourceReport {
    /// Shards whose digest equals the published one.
    pub equal: usize,
    /// Bytes hashed.
    pub bytes: u64,
    /// Shards for which no published digest is known.
    pub unpublished: usize,
    /// Where the digests are written down, with how many shards each.
    pub by: std::collections::BTreeMap<&'static str, usize>,
}

/// How many experts were read.
#[derive(Debug, Default, Serialize)]
pub struct ExpertsReport {
    /// Experts read.
    pub read: usize,
    /// Experts whose checksum is the recorded one.
    pub equal: usize,
}

/// How the banks of a pack are.
#[derive(Debug, Default, Serialize)]
pub struct BanksReport {
    /// Banks that belong to the container.
    pub all: usize,
    /// Banks that are there with the size they should have.
    pub whole: usize,
    /// Banks whose bytes are what was copied, with `--experts`.
    pub equal: usize,
    /// Bytes hashed for that.
    pub bytes: u64,
}

/// How much was quantized again.
#[derive(Debug, Default, Serialize)]
pub struct RederiveReport {
    /// Tensors of which rows were compared.
    pub tensors: usize,
    /// Rows compared.
    pub rows: u64,
}

/// Differences and notes as they are found.
#[derive(Debug, Default)]
struct Findings {
    differences: Lines,
    notes: Lines,
}

impl Findings {
    /// Adds a difference, once: opening and hashing may stumble over the same byte.
    fn differs(&mut self, error: &Error) {
        let line = error.to_string();
        if !self.differences.contains(&line) {
            self.differences.add(|| line);
        }
    }

    fn note(&mut self, line: impl Into<String>) {
        self.notes.add(|| line.into());
    }
}

impl Verification<'_> {
    /// Checks everything that was asked for.
    ///
    /// # Errors
    /// There is nothing to check: no such folder, or no manifest in it.
    pub fn run(&self) -> Result<Report> {
        let mut found = Findings::default();
        let mut report = Report::default();
        let manifest = match Manifest::read(self.dir) {
            Ok(manifest) => manifest,
            Err(error) if error.kind() == ErrorKind::Missing => return Err(self.unfinished(error)),
            Err(error) => {
                found.differs(&error);
                return Ok(conclude(report, found));
            }
        };
        self.manifest_and_sums(&manifest, &mut found)?;
        let container = self.structure(&manifest, &mut found);
        files::check(self, &manifest, &mut found, &mut report)?;
        report.all_shards = manifest.shards.len();
        let snapshots = self.snapshot_dirs(&manifest);
        // Banks stand for the shards, which may be gone, unless both were asked for.
        let pack = banks::folder(&snapshots);
        let shards_too = snapshots.len() > usize::from(pack.is_some()) || self.source;
        if shards_too || pack.is_none() {
            shards::check(self, &manifest, &snapshots, &mut found, &mut report);
        }
        if let (Some(dir), Some(container)) = (pack, &container) {
            report.banks = Some(banks::check(self, container, dir, &snapshots, &mut found));
        }
        if self.source {
            let config = container.as_ref().map(|c| &c.config);
            report.source = Some(published::check(self, &manifest, &snapshots, config, &mut found));
        }
        if let (true, None, Some(container)) = (self.experts, pack, &container) {
            report.experts = Some(experts::check(self, container, &snapshots, &mut found));
        }
        if let Some(sample) = self.rederive {
            match &container {
                Some(container) => {
                    let calibration = self.calibration;
                    let check = rederive::Rederivation {
                        container,
                        snapshots: &snapshots,
                        calibration,
                        sample,
                    };
                    report.rederived = Some(check.run(self.pool, &mut found));
                }
                None => found.note("nothing was rederived, because the container does not open"),
            }
        }
        Ok(conclude(report, found))
    }

    /// Says what a folder without a manifest is, if that can be told.
    fn unfinished(&self, error: Error) -> Error {
        let mut partial = self.dir.as_os_str().to_owned();
        partial.push(".partial");
        let journal = |dir: &Path| dir.join(crate::journal::JOURNAL_FILE).is_file();
        if journal(self.dir) || journal(Path::new(&partial)) {
            return Error::missing("the conversion is not finished")
                .in_file(self.dir)
                .hint("run the same `k3-prep convert` again; it goes on where it stopped");
        }
        error
    }

    fn snapshot_dirs(&self, manifest: &Manifest) -> Vec<PathBuf> {
        if self.snapshots.is_empty() {
            // Empty where the name was not UTF-8 and could not be recorded.
            let recorded = Some(PathBuf::from(&manifest.snapshot));
            return recorded.into_iter().filter(|p| !p.as_os_str().is_empty()).collect();
        }
        let dir = |path: &PathBuf| k3_formats::snapshot::weights_dir(path).unwrap_or(path.clone());
        self.snapshots.iter().map(dir).collect()
    }

    /// The manifest must be the very text its contents give, and the sums those of the
    /// manifest.
    fn manifest_and_sums(&self, manifest: &Manifest, found: &mut Findings) -> Result<()> {
        let manifest_path = self.dir.join(MANIFEST_FILE);
        let text = text_file::read_bytes(&manifest_path, MAX_TEXT)?;
        if text != manifest.to_text().as_bytes() {
            let error = Error::mismatch("not the text that k3-prep writes for its contents");
            found.differs(&error.in_file(&manifest_path));
        }
        let sums_path = self.dir.join(SUMS_FILE);
        let sums = match text_file::read(&sums_path, MAX_TEXT) {
            Ok(sums) => sums,
            Err(error) => {
                found.differs(&error);
                return Ok(());
            }
        };
        let recorded = sums.lines().find_map(|l| l.strip_suffix(MANIFEST_FILE)?.strip_suffix("  "));
        let actual = Digest::of(&text).to_string();
        if recorded != Some(actual.as_str()) {
            let problem = format!(
                "expected SHA-256 {} as in {SUMS_FILE}, found {actual}",
                recorded.unwrap_or("(none)")
            );
            found.differs(&Error::mismatch(problem).in_file(&manifest_path));
        }
        let expected = manifest.sums();
        let (mut ours, mut theirs) = (expected.lines(), sums.lines());
        for line in 1.. {
            match (ours.next(), theirs.next()) {
                (None, None) => break,
                (a, b) if a == b => {}
                (a, b) => {
                    let problem = format!(
                        "expected {:?}, found {:?}",
                        a.unwrap_or("(no line)"),
                        b.unwrap_or("(no line)")
                    );
                    let error = Error::mismatch(problem).item(format!("line {line}"));
                    found.differs(&error.in_file(&sums_path));
                }
            }
        }
        // The same lines may still end in other ways.
        if sums != expected && sums.lines().eq(expected.lines()) {
            let error = Error::mismatch("line ends are not as k3-prep writes them");
            found.differs(&error.in_file(&sums_path));
        }
        Ok(())
    }

    /// Opens the container as k3-run does, and checks what opening takes on trust.
    fn structure(&self, manifest: &Manifest, found: &mut Findings) -> Option<Container> {
        let container = match Container::open(self.dir) {
            Ok(container) => container,
            Err(error) => {
                found.differs(&error);
                return None;
            }
        };
        let manifest_path = self.dir.join(MANIFEST_FILE);
        let specs = dense_tensors(&container.config);
        let mut expected: Vec<String> = specs.iter().map(dense_file_name).collect();
        expected.dedup();
        let small = [EXPERT_TABLE_FILE, TOKENIZER_FILE, "config.json", "tokenizer_config.json"];
        expected.extend(small.map(str::to_owned));
        for name in expected.iter().filter(|name| manifest.file(name).is_none()) {
            let error = Error::missing("not recorded").item(name.clone());
            found.differs(&error.in_file(&manifest_path));
        }
        for spec in specs.iter().filter(|spec| spec.matrix_dims().is_some()) {
            let recorded = container.matrix(&spec.name).map(|m| m.format);
            let expected = manifest.recipe.format_of(spec).unwrap_or(MatrixFormat::Bf16);
            let outcome = recorded.and_then(|recorded| {
                let (expected, recorded) = (expected.name(), recorded.name());
                let problem = || format!("expected {expected} by the recipe, found {recorded}");
                if expected == recorded { Ok(()) } else { Err(Error::mismatch(problem())) }
            });
            if let Err(error) = outcome {
                found.differs(&error.item(spec.name.clone()).in_file(&manifest_path));
            }
        }
        Some(container)
    }
}

fn conclude(mut report: Report, found: Findings) -> Report {
    report.differences = found.differences.into_lines();
    report.notes = found.notes.into_lines();
    report.ok = report.differences.is_empty();
    report
}

/// Path of a recorded file.
fn path_of(dir: &Path, record: &FileRecord) -> PathBuf {
    dir.join(&record.name)
}
