//! Reads that go wrong while the model runs: each read of a run is, in turn, interrupted,
//! cut short, failed, or at the end of its file. What comes of it is the same logits, or an
//! error that names the file, after which the same engine computes the same logits again.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use k3_formats::container::Container;
use k3_formats::recipe::Recipe;
use k3_run::cli::{Act8, EngineArgs};
use k3_run::engine::Engine;
use k3_run::experts::{OpenShard, ReadAt, ShardFiles};
use k3_run::open::{Sequences, engine_reading};
use k3_run::session::Session;

use crate::support::{TinyK3, convert, engine_args};

/// What happens to a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// EINTR before anything was read.
    Interrupted,
    /// One byte, and nonsense behind it.
    OneByte,
    /// Half of what was asked for, and nonsense behind it.
    Half,
    /// EINVAL, as for a direct read that is not of whole blocks.
    Refused,
    /// EIO.
    Broken,
    /// The file ends here.
    End,
}

impl Fault {
    const ALL: [Self; 6] =
        [Self::Interrupted, Self::OneByte, Self::Half, Self::Refused, Self::Broken, Self::End];

    /// Whether the run must go on as if nothing had happened.
    fn is_harmless(self) -> bool {
        matches!(self, Self::Interrupted | Self::OneByte | Self::Half)
    }
}

/// A drive whose read number `at` suffers `fault`.
#[derive(Debug)]
struct Drive {
    reads: AtomicUsize,
    at: AtomicUsize,
    fault: Fault,
    /// Whether all reads from there on suffer it.
    lasting: bool,
}

#[derive(Debug)]
struct Files(Arc<Drive>);

impl OpenShard for Files {
    fn open(&self, path: &Path, direct: bool) -> io::Result<Box<dyn ReadAt>> {
        Ok(Box::new(File { file: ShardFiles.open(path, direct)?, drive: Arc::clone(&self.0) }))
    }
}

struct File {
    file: Box<dyn ReadAt>,
    drive: Arc<Drive>,
}

impl ReadAt for File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let number = self.drive.reads.fetch_add(1, Ordering::Relaxed);
        let at = self.drive.at.load(Ordering::Relaxed);
        let mut short = |part: fn(usize) -> usize| {
            let read = self.file.read_at(buf, offset)?;
            let kept = part(read).clamp(read.min(1), read);
            buf[kept..].fill(0xa5);
            Ok(kept)
        };
        match self.drive.fault {
            _ if number != at && !(self.drive.lasting && number > at) => {
                self.file.read_at(buf, offset)
            }
            // Not for ever, or nothing would ever be read.
            Fault::Interrupted if number % 2 == at % 2 => Err(io::ErrorKind::Interrupted.into()),
            Fault::Interrupted => self.file.read_at(buf, offset),
            Fault::OneByte => short(|_| 1),
            Fault::Half => short(|read| read / 2),
            Fault::Refused => Err(io::Error::from_raw_os_error(22)),
            Fault::Broken => Err(io::Error::from_raw_os_error(5)),
            Fault::End => Ok(0),
        }
    }
}

/// One row of logits.
fn logits(engine: &mut Engine<'_>) -> anyhow::Result<Vec<u32>> {
    let mut session = Session::new(engine, 8);
    let row = session.extend(engine, &[5, 77], &AtomicBool::new(false), |_| {})?;
    Ok(row.iter().map(|x| x.to_bits()).collect())
}

fn engine<'a>(container: &'a Container, args: &EngineArgs, drive: &Arc<Drive>) -> Engine<'a> {
    let files = Arc::new(Files(Arc::clone(drive)));
    engine_reading(container, args, Act8::Off, Sequences::ONE, files).expect("an engine")
}

fn drive(at: usize, fault: Fault, lasting: bool) -> Arc<Drive> {
    Arc::new(Drive { reads: 0.into(), at: at.into(), fault, lasting })
}

#[test]
fn every_read_of_a_run_may_fail_in_every_way() {
    let tiny = TinyK3::new(71);
    let out = tiny.path("container");
    convert(&tiny.snapshot(), &out, &Recipe::default());
    let container = Container::open(&out).unwrap();
    let fixed = ["--threads", "1", "--readers", "1", "--look-ahead", "0", "--expert-cache", "0"];
    let never = || drive(usize::MAX, Fault::Broken, false);
    let want = logits(&mut engine(&container, &engine_args(&out, &fixed), &never())).unwrap();
    let (mut harmless, mut refused) = (0, 0);
    for (direct_io, memory) in [("auto", "stream"), ("off", "resident")] {
        let mut options = fixed.to_vec();
        options.extend(["--direct-io", direct_io, "--memory", memory]);
        // With the second least, some weights are kept and some are read again.
        let ram = crate::memory::budgets(&container).swap_remove(1);
        if memory == "stream" {
            options.extend(["--ram", &ram]);
        }
        let args = engine_args(&out, &options);
        let counted = never();
        let mut good = engine(&container, &args, &counted);
        let opened = counted.reads.load(Ordering::Relaxed);
        assert_eq!(logits(&mut good).unwrap(), want);
        drop(good);
        let reads = counted.reads.load(Ordering::Relaxed);
        assert!(reads > opened + 100, "{memory}: {opened}, {reads} reads");
        for fault in Fault::ALL {
            for (at, lasting) in (opened..reads).map(|at| (at, false)).chain([(opened, true)]) {
                let drive = drive(at, fault, lasting);
                let mut engine = engine(&container, &args, &drive);
                match logits(&mut engine) {
                    Ok(found) => {
                        harmless += 1;
                        assert!(found == want, "{memory}: {fault:?} at read {at}: other logits");
                        assert!(!(lasting && fault == Fault::Broken), "nobody looked");
                    }
                    Err(error) => {
                        refused += 1;
                        let text = format!("{error:#}");
                        assert!(!fault.is_harmless(), "{memory}: {fault:?} at read {at}: {text}");
                        let named = text.contains("cannot read") && text.contains(".safetensors");
                        assert!(named, "{memory}: {fault:?} at read {at}: {text}");
                    }
                }
                // The drive is well again.
                drive.at.store(usize::MAX, Ordering::Relaxed);
                let after = logits(&mut engine).unwrap();
                assert!(after == want, "{memory}: after {fault:?} at read {at}: other logits");
            }
        }
    }
    let tried = format!("{harmless} runs as if nothing had happened, {refused} refused");
    assert!(harmless > 300 && refused > 200, "{tried}");
    #[expect(clippy::print_stdout, reason = "`make faults` shows it")]
    {
        println!("reads that go wrong: {tried}, 0 with other logits");
    }
}
