//! Copies the experts into bank files, byte by byte as they are, each read once.
//!
//! A few banks are written at a time, each from its first expert to its last, so that it is
//! hashed on the way. What a killed copy has finished is in the list of banks; what it was
//! working on is copied again.

use std::collections::BTreeMap;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use k3_formats::container::writer::sync_dir;
use k3_formats::digest::Hasher;
use k3_formats::expert_table::ExpertTable;
use k3_formats::pack::{BankRecord, Checksums, MAX_PACK, PACK_FILE, Pack, PackHeader, bank_name};
use k3_formats::tensor_name::expert_bytes;
use k3_formats::{Error, Result, text_file};
use rayon::ThreadPool;
use rustix::fs::FlockOperation;
use serde::Serialize;

use crate::block_reader::{BlockReader, Pages};
use crate::conversion::check_unchanged;
use crate::expert_sums::{Experts, Sum};
use crate::folder;
use crate::journal;
use crate::output;
use crate::plan::ConversionPlan;
use crate::progress::{Progress, Talk};
use crate::size::Bytes;

/// Banks that are written at once: more would keep no drive busier, and a killed copy does
/// them again.
const AT_ONCE: usize = 4;

/// What to do about a copy that was stopped by an error without a hint of its own.
const GO_ON: &str = "make space, or mend what is named, and run the same command again; banks \
     that are complete are kept";

/// A copy of all experts to be made.
pub struct Packing<'a> {
    /// Says where the experts are.
    pub plan: &'a ConversionPlan,
    /// The folder of the pack, which may have other files in it.
    pub dir: &'a Path,
    /// Copy scales that are NaN too, instead of refusing them.
    pub allow_nonfinite: bool,
    /// Threads that copy.
    pub pool: &'a ThreadPool,
    /// Whether to say how far it is.
    pub talk: Talk,
    /// Called with every bank that is complete; an error stops the copy, which can then be
    /// resumed.
    pub on_bank: &'a (dyn Fn(&BankRecord) -> Result<()> + Sync),
}

/// A pack that is complete.
#[derive(Debug)]
pub struct Packed {
    /// The banks by layer.
    pub banks: BTreeMap<usize, BankRecord>,
    /// How many of them were there before.
    pub before: usize,
}

impl Packed {
    /// Bytes of all banks.
    pub fn bytes(&self) -> u64 {
        self.banks.values().map(|bank| bank.size).sum()
    }

    /// The CRC-32 of every expert in the order of the expert table.
    pub fn checksums(&self) -> Vec<u32> {
        self.banks.values().flat_map(|bank| bank.crc32.0.iter().copied()).collect()
    }
}

/// The list of banks, open and locked.
struct List {
    file: fs_err::File,
    path: std::path::PathBuf,
}

impl Packing<'_> {
    /// Copies what is not there yet.
    ///
    /// # Errors
    /// The folder lies in the snapshot, is in use, or has a pack of other experts; there is
    /// not enough space; a shard cannot be read or changed. Banks that are complete stay.
    pub fn run(&self) -> Result<Packed> {
        self.go_on().map_err(|error| error.hint(GO_ON))
    }

    fn go_on(&self) -> Result<Packed> {
        let plan = self.plan;
        let header = PackHeader::new(&plan.config, &plan.source, &plan.shards);
        folder::keep_out_of(self.dir, &plan.snapshot)?;
        fs_err::create_dir_all(self.dir).map_err(|e| Error::io(self.dir, "create", e))?;
        let (mut list, recorded) = List::open(self.dir, &header)?;
        let there = |bank: &BankRecord| {
            let found = fs_err::symlink_metadata(self.dir.join(&bank.name));
            found.is_ok_and(|m| m.is_file() && m.len() == bank.size)
        };
        let lost = recorded.iter().any(|bank| !there(bank));
        let done: Vec<BankRecord> = recorded.into_iter().filter(there).collect();
        if lost {
            list.start_over(&header, &done)?;
        }
        let is_done = |layer: &usize| done.iter().any(|bank| bank.layer == *layer);
        let todo: Vec<usize> = header.layer_range().filter(|layer| !is_done(layer)).collect();
        let (before, all) = (done.len(), header.layers);
        if before > 0 && !todo.is_empty() && self.talk == Talk::Progress {
            let dir = self.dir.display();
            output::say(format_args!("going on in {dir}: {before} of {all} banks are done"));
        }
        self.check_space(todo.len() as u64 * header.bank_bytes())?;
        let made = self.copy(&header, &todo, list)?;
        let banks = done.into_iter().chain(made).map(|bank| (bank.layer, bank)).collect();
        Ok(Packed { banks, before })
    }

    fn check_space(&self, needed: u64) -> Result<()> {
        let free = folder::free_bytes(self.dir);
        match free {
            Some(free) if free < needed => Err(Error::unsupported(format!(
                "not enough space for the experts: {} ({needed} bytes) needed, {} ({free} bytes) \
                 free",
                Bytes(needed),
                Bytes(free)
            ))
            .in_file(self.dir)
            .hint("make space, or give a folder on another file system")),
            _ => Ok(()),
        }
    }

    /// Copies the banks of the layers `todo`; the first error stops all.
    fn copy(&self, header: &PackHeader, todo: &[usize], list: List) -> Result<Vec<BankRecord>> {
        if todo.is_empty() {
            return Ok(Vec::new());
        }
        let plan = self.plan;
        let sizes: Vec<u64> = plan.shards.iter().map(|s| s.size).collect();
        let table = ExpertTable::new(plan.expert_table(), &plan.config, &sizes)?;
        let open = |path| BlockReader::open(path, Pages::Drop);
        let shards = plan.shard_paths.iter().map(|path| open(path)).collect();
        let experts = Experts { config: &plan.config, table: &table, shards };
        let bytes = todo.len() as u64 * header.experts as u64 * header.expert_bytes;
        let progress = Progress::start("pack experts", bytes, self.talk);
        let next = AtomicUsize::new(0);
        let shared = Mutex::new((list, Vec::with_capacity(todo.len()), None));
        let lock = || shared.lock().unwrap_or_else(PoisonError::into_inner);
        let work = || {
            while let Some(&layer) = todo.get(next.fetch_add(1, Ordering::Relaxed)) {
                let bank = self.bank(header, layer, &experts, &progress);
                let mut shared = lock();
                let (list, made, failed) = &mut *shared;
                let recorded = bank.and_then(|bank| {
                    list.append(&bank)?;
                    let told = (self.on_bank)(&bank);
                    made.push(bank);
                    told
                });
                if let Err(error) = recorded {
                    next.store(todo.len(), Ordering::Relaxed);
                    failed.get_or_insert(error);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..self.pool.current_num_threads().min(AT_ONCE) {
                scope.spawn(work);
            }
        });
        let (_, made, failed) = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
        match failed {
            Some(error) => Err(error),
            None => {
                progress.finish();
                Ok(made)
            }
        }
    }

    /// Copies one bank: beside its name first, then, when it is durable, under it.
    fn bank<B: AsRef<[u8]> + Sync>(
        &self,
        header: &PackHeader,
        layer: usize,
        experts: &Experts<'_, B>,
        progress: &Progress,
    ) -> Result<BankRecord> {
        let name = bank_name(layer);
        let path = self.dir.join(&name);
        let part = self.dir.join(format!("{name}.part"));
        let copied = self.write(&part, header, layer, experts, progress).and_then(|record| {
            check_unchanged(self.plan)?;
            fs_err::rename(&part, &path).map_err(|e| Error::io(&path, "rename into place", e))?;
            sync_dir(self.dir)?;
            Ok(record)
        });
        match &copied {
            // What was read and written once does not push anything out of the page cache.
            Ok(record) => {
                let _ = BlockReader::open(&path, Pages::Keep).map(|b| b.forget(0, record.size));
            }
            // Half a bank would only take the space that the next try needs.
            Err(_) => {
                let _ = fs_err::remove_file(&part);
            }
        }
        copied
    }

    fn write<B: AsRef<[u8]> + Sync>(
        &self,
        part: &Path,
        header: &PackHeader,
        layer: usize,
        experts: &Experts<'_, B>,
        progress: &Progress,
    ) -> Result<BankRecord> {
        let write = |e| Error::io(part, "write", e);
        let mut file = fs_err::File::create(part).map_err(|e| Error::io(part, "create", e))?;
        file.set_permissions(std::fs::Permissions::from_mode(0o644)).map_err(write)?;
        let bytes = usize::try_from(expert_bytes(&self.plan.config)).expect("bounded by config");
        let stride = usize::try_from(header.stride).expect("little more than an expert");
        let mut expert = vec![0; stride];
        let mut hasher = Hasher::new();
        let mut sums = Vec::with_capacity(header.experts);
        for number in 0..header.experts {
            let i = (layer - header.first_layer) * header.experts + number;
            match experts.read(i, &mut expert[..bytes])? {
                Sum { nan: Some(error), .. } if !self.allow_nonfinite => return Err(error),
                Sum { crc32, .. } => sums.push(crc32),
            }
            hasher.update(&expert);
            file.write_all(&expert).map_err(write)?;
            progress.add(bytes as u64);
        }
        file.sync_all().map_err(write)?;
        Ok(BankRecord {
            layer,
            name: bank_name(layer),
            size: header.bank_bytes(),
            sha256: hasher.finish(),
            crc32: Checksums(sums),
        })
    }
}

impl List {
    /// Locks the list in `dir` and reads it; begins one if there is none.
    fn open(dir: &Path, header: &PackHeader) -> Result<(Self, Vec<BankRecord>)> {
        let (file, path) = journal::open(dir, PACK_FILE, FlockOperation::NonBlockingLockExclusive)?;
        let mut list = Self { file, path };
        let text = text_file::read_bytes(&list.path, MAX_PACK)?;
        let (whole, pack) = Pack::parse(&text).map_err(|e| e.in_file(&list.path))?;
        let Some(pack) = pack else {
            list.start_over(header, &[])?;
            return Ok((list, Vec::new()));
        };
        if let Some(difference) = pack.header.difference(header) {
            return Err(Error::mismatch(format!("there is another pack already: {difference}"))
                .in_file(dir)
                .hint("give another folder, or remove this pack first"));
        }
        if !pack.header.same_times(header) {
            return Err(Error::mismatch("the snapshot was written to since this pack was begun")
                .in_file(dir)
                .hint("remove the pack to copy all experts again, or give another folder"));
        }
        list.cut(whole)?;
        Ok((list, pack.banks))
    }

    fn start_over(&mut self, header: &PackHeader, banks: &[BankRecord]) -> Result<()> {
        self.cut(0)?;
        self.append(header)?;
        banks.iter().try_for_each(|bank| self.append(bank))
    }

    fn cut(&mut self, len: u64) -> Result<()> {
        let write = |e| Error::io(&self.path, "write", e);
        self.file.set_len(len).map_err(write)?;
        self.file.seek(SeekFrom::Start(len)).map_err(write)?;
        Ok(())
    }

    /// Records a line when what it is about is durable. A line that is written in part, for
    /// instance on a full disk, is taken back.
    fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec(line).expect("plain data serializes");
        text.push(b'\n');
        let before = self.file.stream_position().map_err(|e| Error::io(&self.path, "write", e))?;
        self.file.write_all(&text).and_then(|()| self.file.sync_all()).map_err(|e| {
            let error = Error::io(&self.path, "write", e);
            let _ = self.cut(before);
            error
        })
    }
}
