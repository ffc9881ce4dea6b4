//! Expert streaming: what is cached, guessed and read in which order never changes a
//! result, and what the drive does wrong is said.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k3_formats::container::Container;
use k3_formats::recipe::Recipe;
use k3_run::engine::{Cancelled, Engine, Inputs, Run, Want};
use k3_run::experts::{
    DirectIo, ExpertOptions, ExpertStats, ExpertStore, LookAhead, OpenShard, ReadAt, ShardFiles,
};
use serde_json::{Map, Value, json};

use crate::support::{TinyK3, convert, engine};

fn container(seed: u64) -> (TinyK3, Container) {
    let snapshot = TinyK3::new(seed);
    let out = snapshot.path("container");
    convert(&snapshot.snapshot(), &out, &Recipe::default());
    let container = Container::open(&out).unwrap();
    (snapshot, container)
}

/// One-expert cache, one reader, short direct reads where there are any, no guesses.
fn plain(container: &Container) -> ExpertOptions {
    ExpertOptions {
        dirs: vec![PathBuf::from(&container.manifest.snapshot)],
        allow_missing: false,
        cache_bytes: 0,
        direct_io: DirectIo::Auto,
        readers: 1,
        read_bytes: 4096,
        verify: false,
        look_ahead: LookAhead::Width(0),
        files: Arc::new(ShardFiles),
    }
}

fn with_store<'a>(container: &'a Container, options: &ExpertOptions) -> Engine<'a> {
    // Its own store, which goes, may find no shards.
    let mut engine = engine(container, &["--allow-missing"]);
    let mut store = ExpertStore::open(container, options, &mut Vec::new()).unwrap();
    engine.swap_experts(&mut store);
    engine
}

/// A prompt in chunks of five, then token by token.
fn logits(engine: &mut Engine<'_>) -> anyhow::Result<Vec<u32>> {
    let ids: Vec<u32> = (0..30).map(|i| (i * 37 + 5) % 700).collect();
    let mut state = engine.new_state(ids.len());
    let mut logits = Vec::new();
    let (chunks, single) = ids.split_at(10);
    for part in chunks.chunks(5).chain(single.chunks(1)) {
        let mut run = [Run { state: &mut state, rows: part.len(), want: Want::All }];
        let step = engine.step(Inputs::Ids(part), &mut run, &AtomicBool::new(false), None)?;
        logits.extend(step.iter().map(|x| x.to_bits()));
    }
    Ok(logits)
}

fn check_books(stats: &ExpertStats, expert_bytes: usize) {
    let wanted = stats.misses * expert_bytes as u64;
    let wasted = stats.look_ahead.wasted_bytes;
    assert_eq!(stats.bytes_read, wanted + wasted, "{stats:?}");
    assert!(stats.look_ahead.used <= stats.look_ahead.begun, "{stats:?}");
}

#[test]
fn readers_guesses_and_caches_never_change_a_bit() {
    let (_snapshot, container) = container(31);
    let plain = plain(&container);
    let mut first = with_store(&container, &plain);
    let want = logits(&mut first).unwrap();
    let without = first.experts().stats();
    check_books(&without, first.experts().expert_bytes());
    let slot_bytes = first.experts().size().bytes / first.experts().size().slots as u64;
    for readers in [1, 2, 4] {
        for look_ahead in [LookAhead::Width(0), LookAhead::Auto, LookAhead::Width(16)] {
            for (slots, direct_io) in
                [(0, DirectIo::Off), (30, DirectIo::Auto), (72, DirectIo::Off)]
            {
                let cache_bytes = slots * slot_bytes;
                let read_bytes = if readers == 4 { 4 << 20 } else { 4096 };
                let options = ExpertOptions {
                    readers,
                    look_ahead,
                    cache_bytes,
                    direct_io,
                    read_bytes,
                    ..plain.clone()
                };
                let mut engine = with_store(&container, &options);
                assert!(logits(&mut engine).unwrap() == want, "{options:?}");
                let stats = engine.experts().stats();
                check_books(&stats, engine.experts().expert_bytes());
                assert_eq!(stats.hits + stats.misses, without.hits + without.misses);
                if slots == 72 {
                    assert_eq!(stats.evictions, 0, "{options:?}");
                }
                let ranks = stats.look_ahead.ranks;
                match look_ahead {
                    LookAhead::Width(0) => assert_eq!(stats.look_ahead.begun, 0),
                    LookAhead::Width(_) => {
                        assert!(stats.look_ahead.begun > 0, "{options:?}");
                        assert!(ranks[2].guessed > 0 && ranks[3].guessed == 0, "three a token");
                    }
                    LookAhead::Auto => {}
                }
            }
        }
    }
}

/// Moves every expert's tensors apart in all shards: all scales first, then the rest.
fn scatter(snapshot: &Path) {
    for entry in fs_err::read_dir(snapshot).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let bytes = fs_err::read(&path).unwrap();
        let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..start]).unwrap();
        let mut tensors: Vec<_> = header.into_iter().collect();
        tensors.sort_by_key(|(name, _)| (!name.ends_with("scale"), name.clone()));
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, tensor) in tensors {
            let at = |i: usize| start + tensor["data_offsets"][i].as_u64().unwrap() as usize;
            let first = data.len();
            data.extend_from_slice(&bytes[at(0)..at(1)]);
            let offsets = json!([first, data.len()]);
            let (dtype, shape) = (&tensor["dtype"], &tensor["shape"]);
            header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        }
        let header = serde_json::to_vec(&header).unwrap();
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header);
        out.extend(data);
        fs_err::write(&path, out).unwrap();
    }
}

#[test]
fn experts_whose_tensors_lie_apart_give_the_same() {
    let (snapshot, whole) = container(32);
    let want = logits(&mut with_store(&whole, &plain(&whole))).unwrap();
    scatter(&snapshot.snapshot());
    let out = snapshot.path("scattered");
    convert(&snapshot.snapshot(), &out, &Recipe::default());
    let container = Container::open(&out).unwrap();
    assert!(container.experts.entry(1, 0).run().is_none(), "they do lie apart");
    let options =
        ExpertOptions { readers: 3, look_ahead: LookAhead::Width(2), ..plain(&container) };
    let mut engine = with_store(&container, &options);
    assert!(logits(&mut engine).unwrap() == want);
    check_books(&engine.experts().stats(), engine.experts().expert_bytes());
}

/// A drive that logs its reads, may be slow, and fails when told to.
#[derive(Debug)]
struct Drive {
    log: Mutex<Vec<(PathBuf, u64)>>,
    /// Reads that still succeed.
    good: AtomicI64,
    delay: Duration,
    /// Set when a layer has begun to read.
    cancel: Arc<AtomicBool>,
}

impl Drive {
    fn new() -> Self {
        Self {
            log: Mutex::default(),
            good: AtomicI64::new(i64::MAX),
            delay: Duration::ZERO,
            cancel: Arc::default(),
        }
    }
}

struct File {
    drive: Arc<Drive>,
    path: PathBuf,
    inner: Box<dyn ReadAt>,
}

#[derive(Debug)]
struct Opener(Arc<Drive>);

impl OpenShard for Opener {
    fn open(&self, path: &Path, direct: bool) -> io::Result<Box<dyn ReadAt>> {
        let inner = ShardFiles.open(path, direct)?;
        Ok(Box::new(File { drive: Arc::clone(&self.0), path: path.to_owned(), inner }))
    }
}

impl ReadAt for File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        std::thread::sleep(self.drive.delay);
        if self.drive.good.fetch_sub(1, Ordering::Relaxed) <= 0 {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.drive.cancel.store(true, Ordering::Relaxed);
        self.drive.log.lock().unwrap().push((self.path.clone(), offset));
        self.inner.read_at(buf, offset)
    }
}

#[test]
fn a_layer_reads_in_disk_order_and_each_expert_once() {
    let (_snapshot, container) = container(33);
    let drive = Arc::new(Drive::new());
    let files = Arc::new(Opener(Arc::clone(&drive)));
    let options = ExpertOptions { files, direct_io: DirectIo::Off, ..plain(&container) };
    let mut engine = with_store(&container, &options);
    let ids: Vec<u32> = (0..8).collect();
    let mut state = engine.new_state(ids.len());
    let mut run = [Run { state: &mut state, rows: ids.len(), want: Want::None }];
    engine.step(Inputs::Ids(&ids), &mut run, &AtomicBool::new(false), None).unwrap();
    let log = drive.log.lock().unwrap();
    // One layer, one shard: both only ever go up.
    assert!(log.is_sorted_by(|a, b| a < b), "{log:?}");
    let experts = engine.experts().stats().misses;
    let pieces = engine.experts().expert_bytes().div_ceil(4096) as u64;
    assert_eq!(log.len() as u64, experts * pieces);
}

#[test]
fn shards_written_to_after_the_conversion_are_named_with_what_would_tell() {
    let (snapshot, container) = container(37);
    let notes = || {
        let mut notes = Vec::new();
        ExpertStore::open(&container, &plain(&container), &mut notes).unwrap();
        notes
    };
    assert_eq!(notes(), Vec::<String>::new());
    let later = std::time::UNIX_EPOCH + std::time::Duration::from_secs(5);
    for shard in ["model-00003-of-000010.safetensors", "model-00007-of-000010.safetensors"] {
        let file = fs_err::OpenOptions::new().write(true).open(snapshot.snapshot().join(shard));
        file.unwrap().set_modified(later).unwrap();
    }
    let note = notes().concat();
    assert!(note.starts_with("2 of 10 shards have another modification time"), "{note}");
    assert!(note.contains("model-00003-of-000010.safetensors, model-00007"), "{note}");
    let dir = container.dir.display();
    assert!(note.contains(&format!("`k3-prep verify {dir} --source` tells")), "{note}");
}

#[test]
fn a_failing_drive_is_named_and_the_store_goes_on_afterwards() {
    let (_snapshot, container) = container(34);
    let want = logits(&mut with_store(&container, &plain(&container))).unwrap();
    for (good, look_ahead) in
        [(0, LookAhead::Width(0)), (100, LookAhead::Width(0)), (300, LookAhead::Width(3))]
    {
        let drive = Arc::new(Drive::new());
        let files = Arc::new(Opener(Arc::clone(&drive)));
        let options = ExpertOptions { files, look_ahead, readers: 2, ..plain(&container) };
        let mut engine = with_store(&container, &options);
        drive.good.store(good, Ordering::Relaxed);
        let error = format!("{:#}", logits(&mut engine).unwrap_err());
        for part in
            ["cannot read layer ", " expert ", " at byte ", ".safetensors in /", "os error 5"]
        {
            assert!(error.contains(part), "{error}");
        }
        drive.good.store(i64::MAX, Ordering::Relaxed);
        for _ in 0..2 {
            assert!(logits(&mut engine).unwrap() == want, "after {good} reads");
        }
    }
}

#[test]
fn a_shard_that_is_cut_or_gone_in_mid_run_is_named() {
    let (snapshot, container) = container(35);
    let want = logits(&mut with_store(&container, &plain(&container))).unwrap();
    let shard = snapshot.snapshot().join("model-00004-of-000010.safetensors");
    let bytes = fs_err::read(&shard).unwrap();
    for direct_io in [DirectIo::Off, DirectIo::Auto] {
        let options = ExpertOptions { direct_io, ..plain(&container) };
        let mut engine = with_store(&container, &options);
        assert!(logits(&mut engine).unwrap() == want);
        fs_err::OpenOptions::new().write(true).open(&shard).unwrap().set_len(30_000).unwrap();
        let error = format!("{:#}", logits(&mut engine).unwrap_err());
        assert!(error.starts_with("cannot read layer 3 expert "), "{error}");
        assert!(error.contains("of model-00004-of-000010.safetensors in /"), "{error}");
        assert!(error.ends_with("unexpected end of file"), "{error}");
        fs_err::write(&shard, &bytes).unwrap();
        assert!(logits(&mut engine).unwrap() == want, "it is back");
    }
    // Shards are opened when they are first needed.
    let mut engine = with_store(&container, &plain(&container));
    fs_err::remove_file(&shard).unwrap();
    let error = format!("{:#}", logits(&mut engine).unwrap_err());
    assert!(error.starts_with("cannot read layer 3 expert "), "{error}");
    assert!(error.contains("No such file"), "{error}");
}

#[test]
fn a_step_given_up_within_a_layer_leaves_the_store_usable() {
    let (_snapshot, container) = container(36);
    let want = logits(&mut with_store(&container, &plain(&container))).unwrap();
    let mut drive = Drive::new();
    drive.delay = Duration::from_millis(1);
    let cancel = Arc::clone(&drive.cancel);
    let files = Arc::new(Opener(Arc::new(drive)));
    let look_ahead = LookAhead::Width(3);
    let options = ExpertOptions { files, readers: 3, look_ahead, ..plain(&container) };
    let mut engine = with_store(&container, &options);
    cancel.store(false, Ordering::Relaxed);
    for rows in [1, 5] {
        let mut state = engine.new_state(rows);
        let mut run = [Run { state: &mut state, rows, want: Want::Last }];
        let ids = vec![7; rows];
        let error = engine.step(Inputs::Ids(&ids), &mut run, &cancel, None).unwrap_err();
        assert!(error.is::<Cancelled>(), "{error:#}");
        assert!(state.is_torn());
        cancel.store(false, Ordering::Relaxed);
    }
    assert!(logits(&mut engine).unwrap() == want);
}

#[test]
fn guesses_are_read_while_the_disk_would_be_idle() {
    // Hidden states of one direction: the next layer's router says what it will say again.
    let (_snapshot, container) = container(37);
    let mut stats = Vec::new();
    for look_ahead in [LookAhead::Width(0), LookAhead::Width(2), LookAhead::Auto] {
        let mut drive = Drive::new();
        drive.delay = Duration::from_micros(200);
        let files = Arc::new(Opener(Arc::new(drive)));
        let options = ExpertOptions { files, look_ahead, readers: 2, ..plain(&container) };
        let mut engine = with_store(&container, &options);
        logits(&mut engine).unwrap();
        check_books(&engine.experts().stats(), engine.experts().expert_bytes());
        stats.push(engine.experts().stats());
    }
    let useful = |s: &ExpertStats| s.bytes_read - s.look_ahead.wasted_bytes;
    assert!(stats[1].look_ahead.used > 0, "{:?}", stats[1]);
    assert!(useful(&stats[1]) <= useful(&stats[0]), "no more is read than what is wasted");
    assert!(stats[2].look_ahead.begun > 0, "the disk is idle between layers: {:?}", stats[2]);
}

#[test]
fn top_p_drops_experts_and_says_so() {
    let (_snapshot, container) = container(38);
    let run = |options: &[&str]| {
        let mut engine = engine(&container, options);
        (logits(&mut engine).unwrap(), engine.experts().stats())
    };
    let (all, every) = run(&[]);
    let (same, _) = run(&["--top-p-experts", "1"]);
    let (other, fewer) = run(&["--top-p-experts", "0.5"]);
    assert!(all == same && all != other);
    assert!(fewer.hits + fewer.misses < every.hits + every.misses);
}

fn pack(snapshot: &TinyK3, to: &str) -> PathBuf {
    let opened = k3_formats::snapshot::Snapshot::open(&snapshot.snapshot()).unwrap();
    let plan = k3_prep::plan::ConversionPlan::new(&opened, &Recipe::default()).unwrap();
    let pool = k3_prep::threads::pool(Some(2)).unwrap();
    let (dir, talk, on_bank) = (snapshot.path(to), k3_prep::Talk::Quiet, &|_: &_| Ok(()));
    let (plan, allow_nonfinite) = (&plan, false);
    k3_prep::pack::Packing { plan, dir: &dir, allow_nonfinite, pool: &pool, talk, on_bank }
        .run()
        .unwrap();
    dir
}

#[test]
fn a_pack_gives_the_same_bits_as_the_shards() {
    let (snapshot, container) = container(39);
    let want = logits(&mut with_store(&container, &plain(&container))).unwrap();
    let dir = pack(&snapshot, "pack");
    fs_err::rename(snapshot.snapshot(), snapshot.path("gone")).unwrap();
    // Banks may be spread over drives as shards may.
    let other = snapshot.path("other drive");
    fs_err::create_dir(&other).unwrap();
    let bank = "experts-layer-003.bank";
    fs_err::rename(dir.join(bank), other.join(bank)).unwrap();
    let dirs = vec![dir.clone(), other.clone()];
    for (direct_io, look_ahead) in
        [(DirectIo::Auto, LookAhead::Width(3)), (DirectIo::Off, LookAhead::Width(0))]
    {
        // The copy recorded checksums, the conversion did not.
        let verify = direct_io == DirectIo::Auto;
        let dirs = dirs.clone();
        let options =
            ExpertOptions { dirs, direct_io, look_ahead, verify, readers: 2, ..plain(&container) };
        let mut engine = with_store(&container, &options);
        assert_eq!(engine.experts().files(), (6, "banks"));
        assert!(logits(&mut engine).unwrap() == want, "{options:?}");
        check_books(&engine.experts().stats(), engine.experts().expert_bytes());
    }
    let open = |container: &Container, dirs: &[PathBuf]| {
        let options = ExpertOptions { dirs: dirs.to_vec(), verify: true, ..plain(container) };
        ExpertStore::open(container, &options, &mut Vec::new())
    };
    let error = open(&container, &dirs[..1]).err().unwrap().to_string();
    assert!(error.contains("1 of 6 banks are not what they were"), "{error}");
    assert!(error.contains("experts-layer-003.bank: missing, expected "), "{error}");

    // A flipped bit is named; so is a pack that is not whole, or not of these experts.
    let mut bytes = fs_err::read(other.join(bank)).unwrap();
    let stride = bytes.len() / 12;
    bytes.iter_mut().step_by(stride).for_each(|first| *first ^= 4);
    fs_err::write(other.join(bank), bytes).unwrap();
    let options = ExpertOptions { dirs: dirs.clone(), verify: true, ..plain(&container) };
    let error = logits(&mut with_store(&container, &options)).unwrap_err();
    let error = format!("{error:#}");
    assert!(error.starts_with("cannot read layer 3 expert "), "{error}");
    assert!(error.contains(bank) && error.contains("CRC-32"), "{error}");

    let list = dir.join("pack.jsonl");
    let text = fs_err::read_to_string(&list).unwrap();
    fs_err::write(&list, text.lines().take(4).map(|l| l.to_owned() + "\n").collect::<String>())
        .unwrap();
    let error = open(&container, &dirs).err().unwrap().to_string();
    assert!(error.contains("expected 6 banks, found 3"), "{error}");
    let stranger = TinyK3::with_dims(r#"{"vocab": 1280}"#, 39);
    let out = stranger.path("container");
    convert(&stranger.snapshot(), &out, &Recipe::default());
    let stranger = Container::open(&out).unwrap();
    let error = open(&stranger, &dirs).err().unwrap().to_string();
    assert!(error.contains("not a pack of this container's experts: copied from"), "{error}");
}

#[test]
fn missing_and_short_shards_are_refused_or_fail_at_their_first_expert() {
    let (snapshot, container) = container(40);
    let want = logits(&mut with_store(&container, &plain(&container))).unwrap();
    let shard = |n: usize| format!("model-{n:05}-of-000010.safetensors");
    // The first drive has a download that broke off, the second the whole file.
    let (first, second) = (snapshot.snapshot(), snapshot.path("second"));
    fs_err::create_dir(&second).unwrap();
    let size = fs_err::metadata(first.join(shard(5))).unwrap().len();
    for n in [4, 5] {
        fs_err::rename(first.join(shard(n)), second.join(shard(n))).unwrap();
    }
    fs_err::write(first.join(shard(5)), [0; 1000]).unwrap();
    let dirs = vec![first.clone(), second.clone()];
    let options = ExpertOptions { dirs, allow_missing: true, ..plain(&container) };
    let mut notes = Vec::new();
    let mut store = ExpertStore::open(&container, &options, &mut notes).unwrap();
    assert_eq!(notes, Vec::<String>::new());
    let mut engine = engine(&container, &["--allow-missing"]);
    engine.swap_experts(&mut store);
    assert!(logits(&mut engine).unwrap() == want, "the whole one is taken");

    // Without the second one.
    let options = ExpertOptions { dirs: vec![first.clone()], ..options };
    let strict = ExpertOptions { allow_missing: false, ..options.clone() };
    let error = ExpertStore::open(&container, &strict, &mut Vec::new()).err().unwrap();
    let error = error.downcast::<k3_formats::Error>().unwrap();
    let text = error.to_string();
    assert!(text.contains("2 of 10 shards are not what they were"), "{text}");
    assert!(text.contains(&format!("{}: missing, expected ", shard(4))), "{text}");
    let short = format!("{}: expected {size} bytes, found 1000 in {}", shard(5), first.display());
    assert!(text.contains(&short), "{text}");
    assert!(error.hint_text().unwrap().contains("--allow-missing"));
    for look_ahead in [LookAhead::Width(0), LookAhead::Width(3)] {
        let options = ExpertOptions { look_ahead, readers: 2, ..options.clone() };
        let mut notes = Vec::new();
        let mut store = ExpertStore::open(&container, &options, &mut notes).unwrap();
        assert!(notes[0].contains("2 of 10 shards are not what they were"), "{notes:?}");
        engine.swap_experts(&mut store);
        for _ in 0..2 {
            let error = logits(&mut engine).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.starts_with("cannot read layer 3 expert "), "{text}");
            assert!(text.contains(&format!("of {}: missing, expected ", shard(4))), "{text}");
            let error = error.downcast::<k3_formats::Error>().unwrap();
            assert!(error.hint_text().unwrap().contains("download the file again"));
        }
        engine.swap_experts(&mut store);
        assert!(logits(&mut engine).unwrap() == want, "another store serves the same engine");
    }
}

/// Steps that `logits` makes.
const STEPS: u32 = 22;

fn warmed(store: &ExpertStore, want: u64) -> ExpertStats {
    let began = std::time::Instant::now();
    loop {
        let stats = store.stats();
        let bytes = want * store.expert_bytes() as u64;
        if stats.warmed == want && stats.bytes_read == bytes {
            return stats;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{want}: {stats:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn usage_is_kept_and_warms_the_next_start() {
    let (snapshot, container) = container(41);
    let plain = plain(&container);
    let mut first = with_store(&container, &plain);
    let want = logits(&mut first).unwrap();
    let slot = first.experts().size().bytes / first.experts().size().slots as u64;
    let options = ExpertOptions { cache_bytes: 38 * slot, readers: 2, ..plain.clone() };
    let dir = snapshot.path("cache/k3");
    let with_usage = |options: &ExpertOptions, began: bool| {
        let mut engine = engine(&container, &["--allow-missing"]);
        let mut store = ExpertStore::open(&container, options, &mut Vec::new()).unwrap();
        let warm = store.keep_usage(&container, &dir);
        assert_eq!(warm.is_some(), began);
        if let Some(warm) = warm {
            warm.begin();
        }
        engine.swap_experts(&mut store);
        engine
    };
    let files = || {
        let files = fs_err::read_dir(&dir).unwrap().map(|f| f.unwrap().path());
        files.collect::<Vec<_>>()
    };
    // A store that made no step leaves nothing; three processes are enough to go by.
    drop(with_usage(&options, false));
    assert!(!dir.exists());
    let mut cold = None;
    for _ in 0..3 {
        let mut engine = with_usage(&options, false);
        assert!(logits(&mut engine).unwrap() == want);
        cold.get_or_insert(engine.experts().stats());
        drop(engine);
        assert_eq!(files().len(), 1);
    }
    const { assert!(3 * STEPS >= 64 && 2 * STEPS < 64) };
    let file = files().remove(0);
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&fs_err::metadata(&file).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(fs_err::metadata(&file).unwrap().len(), 44 + 2 * 72 + 4);

    // Half of the thirty experts that stay are there before anyone asks.
    let mut engine = with_usage(&options, true);
    warmed(engine.experts(), 15);
    assert!(logits(&mut engine).unwrap() == want);
    let stats = engine.experts().stats();
    assert!(stats.misses < cold.unwrap().misses, "{stats:?} {cold:?}");
    drop(engine);

    // In the middle of it, whatever is asked for: the same bits, and every expert asked for
    // is either one that was there or one that was read.
    let saved = fs_err::read(&file).unwrap();
    for (readers, look_ahead, slots) in [
        (1, LookAhead::Width(0), 38),
        (3, LookAhead::Width(3), 38),
        (4, LookAhead::Width(16), 20),
        (2, LookAhead::Auto, 72),
        (2, LookAhead::Width(2), 10),
    ] {
        let mut drive = Drive::new();
        drive.delay = Duration::from_micros(300);
        let files = Arc::new(Opener(Arc::new(drive)));
        let cache_bytes = slots * slot;
        let options = ExpertOptions { readers, look_ahead, cache_bytes, files, ..plain.clone() };
        fs_err::write(&file, &saved).unwrap();
        let mut engine = with_usage(&options, true);
        assert!(logits(&mut engine).unwrap() == want, "{options:?}");
        let kept = engine.experts().size().experts as u64;
        assert!(engine.experts().stats().warmed <= kept / 2, "{options:?}");
    }

    // A drive that fails meanwhile is nobody's business until an expert is needed.
    fs_err::write(&file, &saved).unwrap();
    let drive = Arc::new(Drive::new());
    let opener = Arc::new(Opener(Arc::clone(&drive)));
    drive.good.store(6, Ordering::Relaxed);
    let broken = ExpertOptions { files: opener, direct_io: DirectIo::Off, ..options.clone() };
    let mut engine = with_usage(&broken, true);
    let began = std::time::Instant::now();
    while engine.experts().stats().warmed < 15 {
        assert!(began.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(1));
    }
    drive.good.store(i64::MAX, Ordering::Relaxed);
    assert!(logits(&mut engine).unwrap() == want);
    drop(engine);

    // What is damaged, or of another container, is as good as nothing; so is a folder that
    // cannot be made.
    for bytes in [&b""[..], &saved[..saved.len() - 1], &[0xff; 1 << 16]] {
        fs_err::write(&file, bytes).unwrap();
        assert!(logits(&mut with_usage(&options, false)).unwrap() == want);
    }
    fs_err::remove_dir_all(&dir).unwrap();
    fs_err::write(&dir, b"in the way").unwrap();
    assert!(logits(&mut with_usage(&options, false)).unwrap() == want);
    assert_eq!(fs_err::read(&dir).unwrap(), b"in the way");
}

#[test]
fn programs_keep_usage_where_the_user_keeps_such_things_unless_told_not_to() {
    let demo = crate::support::demo_container();
    let dir = demo.path();
    let generate = |home: &str, more: &[&str]| {
        let mut command = std::process::Command::new(crate::support::program());
        command.arg("generate").arg(dir.join("container")).args(["--prompt", "She", "-n", "8"]);
        command.args(more).env_remove("K3_NO_USAGE").env_remove("XDG_CACHE_HOME");
        match home {
            "xdg" => command.env("XDG_CACHE_HOME", dir.join("xdg")),
            _ => command.env("HOME", dir.join("home")),
        };
        let output = command.output().unwrap();
        assert!(output.status.success());
        (output.stdout, String::from_utf8(output.stderr).unwrap())
    };
    let (want, _) = generate("home", &["--no-usage"]);
    assert!(!dir.join("home").exists());
    for _ in 0..12 {
        let (text, said) = generate("home", &[]);
        assert!(text == want && !said.contains("warning"), "{said}");
    }
    assert_eq!(fs_err::read_dir(dir.join("home/.cache/k3")).unwrap().count(), 1);
    assert!(generate("xdg", &[]).0 == want);
    assert_eq!(fs_err::read_dir(dir.join("xdg/k3")).unwrap().count(), 1);
    fs_err::remove_dir_all(dir.join("xdg")).unwrap();
    fs_err::write(dir.join("xdg"), b"").unwrap();
    let (text, said) = generate("xdg", &[]);
    assert!(text == want && said.contains("warning: the usage of experts is not kept: "), "{said}");
}
