//! The file systems that shards are on: direct I/O, and reads of an expert's size.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use serde::Serialize;

use crate::block_reader::{BlockReader, Pages, read_exact_at};

/// Alignment of direct reads, in bytes.
const ALIGN: u64 = 4096;

/// Longest time that is read with so many reads in flight.
const READ_FOR: Duration = Duration::from_millis(700);

/// Most files that are read.
const MOST_FILES: usize = 8;

/// The shards in one folder.
#[derive(Debug, Serialize)]
pub struct Drive {
    /// The folder.
    pub dir: PathBuf,
    /// Name of its file system, where it is known.
    pub file_system: &'static str,
    /// Bytes free.
    pub free: Option<u64>,
    /// Whether a direct read works, as one did or did not.
    pub direct_io: bool,
    /// Speeds by reads in flight; empty where the shards have no data.
    pub reads: Vec<ReadSpeed>,
}

/// How fast reads of an expert's size are.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ReadSpeed {
    /// Reads at once.
    pub in_flight: usize,
    /// Bytes per second of all of them together.
    pub bytes_per_second: f64,
    /// Mean time of one read, in milliseconds.
    pub milliseconds: f64,
}

impl Drive {
    /// The fastest.
    pub fn best(&self) -> Option<ReadSpeed> {
        self.reads.iter().copied().max_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second))
    }
}

/// Measures each folder that shards are in, with reads of `bytes` at places drawn at random.
pub(super) fn measure(shards: &[PathBuf], bytes: u64) -> Vec<Drive> {
    let mut dirs: Vec<&Path> = shards.iter().filter_map(|shard| shard.parent()).collect();
    dirs.sort_unstable();
    dirs.dedup();
    let drive = |dir: &Path| {
        let here = shards.iter().filter(|shard| shard.parent() == Some(dir));
        let here: Vec<&PathBuf> = here.collect();
        let direct_io = here.first().is_some_and(|shard| direct_works(shard).is_ok());
        let stat = rustix::fs::statvfs(dir).ok();
        Drive {
            file_system: file_system(dir),
            free: stat.and_then(|s| s.f_bavail.checked_mul(s.f_frsize)),
            direct_io,
            reads: read_speeds(&here, bytes, direct_io),
            dir: dir.to_path_buf(),
        }
    };
    dirs.into_iter().map(drive).collect()
}

fn read_speeds(shards: &[&PathBuf], bytes: u64, direct: bool) -> Vec<ReadSpeed> {
    // Holes say nothing of a drive.
    let has_data = |path: &&&PathBuf| {
        let meta = fs_err::metadata(path);
        meta.is_ok_and(|m| m.len() >= 2 * ALIGN && m.blocks() * 512 >= m.len() / 2)
    };
    let files: Vec<Sample> = shards
        .iter()
        .filter(has_data)
        .step_by(shards.len().div_ceil(MOST_FILES).max(1))
        .filter_map(|path| Sample::open(path, direct).ok())
        .collect();
    if files.is_empty() {
        return Vec::new();
    }
    [1, 2, 4, 8].into_iter().filter_map(|n| speed(&files, bytes, n)).collect()
}

/// A file to read from.
struct Sample {
    file: fs_err::File,
    size: u64,
    /// To drop what is read through the page cache.
    cached: Option<BlockReader>,
}

impl Sample {
    fn open(path: &Path, direct: bool) -> io::Result<Self> {
        let file = if direct { open_direct(path)? } else { fs_err::File::open(path)? };
        let size = file.metadata()?.len();
        let cached = if direct { None } else { BlockReader::open(path, Pages::Drop).ok() };
        Ok(Self { file, size, cached })
    }
}

fn speed(files: &[Sample], bytes: u64, in_flight: usize) -> Option<ReadSpeed> {
    let (read, count, busy) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for reader in 0..in_flight {
            let (read, count, busy) = (&read, &count, &busy);
            scope.spawn(move || {
                let len = bytes.next_multiple_of(ALIGN);
                let Ok(mut buffer) = MmapMut::map_anon(len as usize) else { return };
                let mut rng = fastrand::Rng::with_seed((8 * in_flight + reader) as u64);
                while start.elapsed() < READ_FOR {
                    let sample = &files[rng.usize(0..files.len())];
                    // Whole blocks inside the file.
                    let n = len.min(sample.size / ALIGN * ALIGN);
                    let at = rng.u64(0..=(sample.size - n) / ALIGN) * ALIGN;
                    if let Some(cached) = &sample.cached {
                        cached.forget(at, n);
                    }
                    let begin = Instant::now();
                    if read_exact_at(&sample.file, &mut buffer[..n as usize], at).is_err() {
                        return;
                    }
                    let took = begin.elapsed().as_micros();
                    busy.fetch_add(u64::try_from(took).unwrap_or(u64::MAX), Ordering::Relaxed);
                    read.fetch_add(n, Ordering::Relaxed);
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let (read, count, busy) = (read.into_inner(), count.into_inner(), busy.into_inner());
    (count > 0).then(|| ReadSpeed {
        in_flight,
        bytes_per_second: read as f64 / start.elapsed().as_secs_f64(),
        milliseconds: busy as f64 / 1e3 / count as f64,
    })
}

/// One real aligned read: some file systems accept the flag and refuse the read.
fn direct_works(path: &Path) -> io::Result<()> {
    let file = open_direct(path)?;
    let mut block = MmapMut::map_anon(ALIGN as usize)?;
    read_exact_at(&file, &mut block, 0)
}

#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> io::Result<fs_err::File> {
    use fs_err::os::unix::fs::OpenOptionsExt;
    let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    fs_err::OpenOptions::new().read(true).custom_flags(flags).open(path)
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_: &Path) -> io::Result<fs_err::File> {
    Err(io::ErrorKind::Unsupported.into())
}

/// By the number that the kernel gives each kind.
#[cfg(target_os = "linux")]
fn file_system(dir: &Path) -> &'static str {
    let kind = rustix::fs::statfs(dir).map_or(0, |stat| stat.f_type as u32);
    match kind {
        0x0000_ef53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0x2fc1_2fc1 => "zfs",
        0xf2f5_2010 => "f2fs",
        0x0102_1994 => "tmpfs",
        0x794c_7630 => "overlay",
        0x6573_5546 => "fuse",
        0x0000_6969 => "nfs",
        0xfe53_4d42 | 0xff53_4d42 => "smb",
        0x0102_1997 => "9p",
        0x7366_746e => "ntfs",
        0x2011_bab0 => "exfat",
        _ => "unknown",
    }
}

#[cfg(not(target_os = "linux"))]
fn file_system(_: &Path) -> &'static str {
    "unknown"
}
