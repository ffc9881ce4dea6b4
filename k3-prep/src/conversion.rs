//! Carries out a plan: resumes or begins, writes every file, and gives the result its name.

use std::path::Path;

use k3_formats::container::manifest::{FileRecord, MANIFEST_FILE, Manifest, SUMS_FILE};
use k3_formats::container::writer::write_file;
use k3_formats::snapshot::ShardFile;
use k3_formats::{Error, Result};
use rayon::ThreadPool;

use crate::expert_scales;
use crate::folder::{OutputFolder, REPLACE};
use crate::identity::Identity;
use crate::journal::{self, Done, Journal};
use crate::output;
use crate::part;
use crate::pipeline::Pipeline;
use crate::plan::{ConversionPlan, DenseFile};
use crate::progress::{Progress, Talk};
use crate::size::Bytes;

/// How a conversion is carried out; none of it changes a byte of the result.
pub struct Conversion<'a> {
    /// Replace a container that is there already, and start over.
    pub force: bool,
    /// Take NaN and infinite weights as 0, and say so, instead of refusing them.
    pub allow_nonfinite: bool,
    /// Whether to say how far it is.
    pub talk: Talk,
    /// Threads that quantize.
    pub pool: &'a ThreadPool,
    /// Called with every dense file that is complete; an error stops the conversion, which
    /// can then be resumed.
    pub on_file: &'a mut (dyn FnMut(&FileRecord) -> Result<()> + Send),
}

/// A complete container.
#[derive(Debug)]
pub struct Converted {
    /// Its manifest.
    pub manifest: Manifest,
    /// Whether it was there before.
    pub before: bool,
}

impl Conversion<'_> {
    /// Writes the container at `out`, or goes on with one that was begun, or finds that the
    /// same one is there already.
    ///
    /// # Errors
    /// `out` is in use or another container is in the way, there is not enough space, a weight is NaN or
    /// infinite, the snapshot changed, or the disk refuses. What is done stays in
    /// `OUT.partial`.
    pub fn run(self, plan: &ConversionPlan, out: &Path) -> Result<Converted> {
        self.complete(plan, out, Missing::Convert)
    }

    /// Completes what parts have converted: as [`Conversion::run`], but converts no weight.
    ///
    /// # Errors
    /// Also when dense files are missing: says of which shards.
    pub fn finish(self, plan: &ConversionPlan, out: &Path) -> Result<Converted> {
        self.complete(plan, out, Missing::Refuse)
    }

    fn complete(self, plan: &ConversionPlan, out: &Path, missing: Missing) -> Result<Converted> {
        let folder = OutputFolder::check(out, &plan.snapshot, self.force)?;
        if let Some(manifest) = existing(plan, &folder)? {
            return Ok(Converted { manifest, before: true });
        }
        expert_scales::check(plan, self.pool, self.allow_nonfinite)?;
        folder.create()?;
        let mut journal = Journal::lock(folder.work())?;
        if self.force {
            journal.start_over()?;
            folder.clear(|_| false)?;
        }
        let mut done = journal.resume(&Identity::of_work(plan))?;
        done.extend(journal::done_in_parts(folder.work(), &Identity::of_parts(&plan.recipe))?);
        let done = trusted(plan, folder.work(), done);
        let todo = not_in(&done, plan, |_| true);
        if missing == Missing::Refuse && !todo.is_empty() {
            return Err(part::not_converted(plan, &todo, folder.work()));
        }
        folder.clear(|name| {
            journal::part_of(name).is_some() || done.iter().any(|f| f.name == name)
        })?;
        check_space(plan, &folder, &done)?;
        if !done.is_empty() && self.talk == Talk::Progress {
            output::say(format_args!(
                "going on in {}: {} of {} dense files are done",
                folder.work().display(),
                done.len(),
                plan.dense.len()
            ));
        }
        let made =
            self.dense_files(plan, &folder, todo, |record| journal.record(record, vec![]))?;
        let place = |record: &FileRecord| plan.dense.iter().position(|f| f.name == record.name);
        let mut dense: Vec<FileRecord> = done.into_iter().chain(made).collect();
        dense.sort_by_key(place);
        check_unchanged(plan)?;
        let manifest = write_the_rest(plan, folder.work(), dense)?;
        folder.publish()?;
        Ok(Converted { manifest, before: false })
    }

    /// Writes the dense files numbered in `todo`; `done` is told of each before anyone else.
    pub(crate) fn dense_files(
        self,
        plan: &ConversionPlan,
        folder: &OutputFolder,
        todo: Vec<usize>,
        mut done: impl FnMut(&FileRecord) -> Result<()> + Send,
    ) -> Result<Vec<FileRecord>> {
        if todo.is_empty() {
            return Ok(Vec::new());
        }
        let mut records = Vec::with_capacity(todo.len());
        let bytes = todo.iter().map(|&i| plan.dense[i].source_bytes()).sum();
        let progress = Progress::start("convert", bytes, self.talk);
        let pipeline = Pipeline {
            plan,
            dir: folder.work(),
            pool: self.pool,
            progress: &progress,
            allow_nonfinite: self.allow_nonfinite,
        };
        let on_file = self.on_file;
        pipeline.run(todo, |record| {
            done(&record)?;
            let told = on_file(&record);
            records.push(record);
            told
        })?;
        progress.finish();
        Ok(records)
    }
}

/// What to do about dense files that nobody has converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    Convert,
    Refuse,
}

/// Numbers of the dense files that are wanted and not done.
pub(crate) fn not_in(
    done: &[FileRecord],
    plan: &ConversionPlan,
    wanted: impl Fn(&DenseFile) -> bool,
) -> Vec<usize> {
    let open = |file: &DenseFile| wanted(file) && !done.iter().any(|f| f.name == file.name);
    (0..plan.dense.len()).filter(|&i| open(&plan.dense[i])).collect()
}

/// The container that is there already, if it is what the plan would make.
///
/// # Errors
/// It is another one, or it is not whole.
pub(crate) fn existing(plan: &ConversionPlan, folder: &OutputFolder) -> Result<Option<Manifest>> {
    let Some(manifest) = folder.existing()? else { return Ok(None) };
    let difference = Identity::of_container(&manifest).difference(&Identity::of(plan));
    if let Some(difference) = difference {
        let problem = format!("there is another container already: {difference}");
        return Err(Error::mismatch(problem).in_file(folder.out()).hint(REPLACE));
    }
    for file in &manifest.files {
        let path = folder.out().join(&file.name);
        if !fs_err::metadata(&path).is_ok_and(|m| m.len() == file.size) {
            let problem = format!("this container should have a file of {} bytes here", file.size);
            return Err(Error::mismatch(problem).in_file(path).hint(REPLACE));
        }
    }
    Ok(Some(manifest))
}

/// The recorded files that are there with the size they should have, and came from the
/// shards as they are now; each once.
pub(crate) fn trusted(plan: &ConversionPlan, dir: &Path, recorded: Vec<Done>) -> Vec<FileRecord> {
    let whole = |record: &FileRecord| {
        let planned = plan.dense.iter().find(|f| f.name == record.name);
        let size = planned.map(|f| f.layout.file_size());
        let found = fs_err::symlink_metadata(dir.join(&record.name)).ok();
        size == Some(record.size) && found.is_some_and(|m| m.is_file() && m.len() == record.size)
    };
    let mut files: Vec<FileRecord> = Vec::new();
    for Done { file, from } in recorded {
        let unchanged = from.iter().all(|shard| plan.shards.contains(shard));
        if unchanged && whole(&file) && !files.iter().any(|f| f.name == file.name) {
            files.push(file);
        }
    }
    files
}

fn check_space(plan: &ConversionPlan, folder: &OutputFolder, done: &[FileRecord]) -> Result<()> {
    // Names and digests of the manifest, and the blocks that a file system rounds up to.
    let tensors: usize = plan.dense.iter().map(|f| f.layout.spans.len()).sum();
    let files = plan.dense.len() + plan.small.len() + 2;
    let around = 512 * (tensors + plan.left_out.len() + plan.shards.len()) + 4096 * files;
    let written: u64 = done.iter().map(|f| f.size).sum();
    enough_space(folder, (plan.output_bytes() + around as u64).saturating_sub(written))
}

/// Whether the file system has room for `needed` bytes.
pub(crate) fn enough_space(folder: &OutputFolder, needed: u64) -> Result<()> {
    match folder.free_bytes() {
        Some(free) if free < needed => Err(Error::unsupported(format!(
            "not enough space: {} ({needed} bytes) needed, {} ({free} bytes) free",
            Bytes(needed),
            Bytes(free)
        ))
        .in_file(folder.work())
        .hint("make space, or give an output on another file system")),
        _ => Ok(()),
    }
}

/// The shards must be at the end what they were when their headers were read.
pub(crate) fn check_unchanged(plan: &ConversionPlan) -> Result<()> {
    for (shard, path) in plan.shards.iter().zip(&plan.shard_paths) {
        let now = ShardFile::of(path).map_err(|e| Error::io(path, "look at", e))?;
        if (now.size, now.modified_ns) != (shard.size, shard.modified_ns) {
            return Err(Error::mismatch("the file changed while it was converted")
                .in_file(path)
                .hint("wait until nothing writes to the snapshot, then run this with --force"));
        }
    }
    Ok(())
}

fn write_the_rest(
    plan: &ConversionPlan,
    dir: &Path,
    mut files: Vec<FileRecord>,
) -> Result<Manifest> {
    for file in &plan.small {
        files.push(write_file(&dir.join(file.name), &file.bytes)?);
    }
    let manifest = plan.manifest(files);
    write_file(&dir.join(MANIFEST_FILE), manifest.to_text().as_bytes())?;
    write_file(&dir.join(SUMS_FILE), manifest.sums().as_bytes())?;
    Ok(manifest)
}
