//! The memory budget: plans, refusals, and equal results in every mode and budget.

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use k3_formats::ModelConfig;
use k3_formats::container::Container;
use k3_formats::recipe::Recipe;
use k3_formats::tensor_name::dense_tensors;
use k3_prep::synth::{Preset, Routing, SynthOptions, write_snapshot};
use k3_run::cli::Act8;
use k3_run::dense::Placement;
use k3_run::engine::{Inputs, Run, Want};
use k3_run::memory::{MemoryMode, MemoryPlan};
use k3_run::open;

use crate::support::{TinyK3, convert, engine, engine_args, recipe};

/// A head of several pieces, and layers whose matrices are read in one.
const WIDE_VOCABULARY: &str = r#"{"vocab": 40000}"#;

fn container(recipe: &Recipe) -> (TinyK3, PathBuf) {
    let snapshot = TinyK3::with_dims(WIDE_VOCABULARY, 21);
    let out = snapshot.path("container");
    convert(&snapshot.snapshot(), &out, recipe);
    (snapshot, out)
}

fn plan(container: &Container, options: &[&str]) -> anyhow::Result<MemoryPlan> {
    open::memory_plan(container, &engine_args(&container.dir, options), Act8::Experts)
}

/// The smallest budget that works with these options, as the refusal of a smaller one says.
fn smallest(container: &Container, options: &[&str]) -> u64 {
    let least = plan(container, &[options, &["--ram", "0"]].concat()).unwrap_err();
    let hint = least.downcast_ref::<k3_formats::Error>().unwrap().hint_text().unwrap();
    let smallest = hint.split_once("--ram ").unwrap().1.split_once('M').unwrap().0;
    smallest.parse::<u64>().unwrap() << 20
}

/// Budgets from the smallest that streams to one that keeps everything.
pub(crate) fn budgets(container: &Container) -> Vec<String> {
    let smallest = smallest(container, &["--memory", "stream", "--expert-cache", "0"]);
    let all = plan(container, &["--memory", "resident", "--expert-cache", "0"]).unwrap().total();
    (0..6).map(|i| (smallest + (all - smallest) * i / 5).to_string()).collect()
}

#[test]
fn logits_are_the_same_in_every_mode_and_budget() {
    let (_snapshot, out) = container(&recipe(4, 8, 16));
    let container = Container::open(&out).unwrap();
    let prompt: Vec<u32> = (0..40).map(|i| (i * 997 + 5) % 39_000).collect();
    let run = |options: &[&str]| {
        let options = [&["--expert-cache", "0", "--chunk", "9"], options].concat();
        let mut engine = engine(&container, &options);
        let mut state = engine.new_state(prompt.len());
        let mut logits = Vec::new();
        for (i, ids) in prompt.chunks(9).enumerate() {
            // Logits of no row, of one, and of all: the head is streamed for two of them.
            let want = [Want::None, Want::Last, Want::All][i % 3];
            let mut run = [Run { state: &mut state, rows: ids.len(), want }];
            let cancel = AtomicBool::new(false);
            let step = engine.step(Inputs::Ids(ids), &mut run, &cancel, None).unwrap();
            logits.extend(step.iter().map(|x| x.to_bits()));
        }
        (logits, engine.dense().bytes_read())
    };
    let (want, _) = run(&["--memory", "mmap"]);
    assert!(run(&["--memory", "resident"]).0 == want);
    let mut read = Vec::new();
    for ram in budgets(&container) {
        let (logits, bytes) = run(&["--memory", "stream", "--ram", &ram]);
        assert!(logits == want, "a budget of {ram} changes the result");
        read.push(bytes);
    }
    assert!(read.is_sorted_by(|a, b| a >= b), "{read:?}");
    assert!(read[0] > 2 * read[5], "{read:?}");
}

#[test]
fn a_cancelled_step_leaves_the_stream_usable() {
    let (_snapshot, out) = container(&Recipe::default());
    let container = Container::open(&out).unwrap();
    let budgets = budgets(&container);
    let mut engine = engine(&container, &["--memory", "stream", "--ram", &budgets[0]]);
    let mut state = engine.new_state(8);
    let mut step = |cancel: bool| {
        state.reset();
        let mut run = [Run { state: &mut state, rows: 3, want: Want::Last }];
        let done = engine.step(Inputs::Ids(&[1, 2, 3]), &mut run, &AtomicBool::new(cancel), None);
        done.map(<[f32]>::to_vec)
    };
    let first = step(false).unwrap();
    for _ in 0..5 {
        assert!(step(true).unwrap_err().to_string().contains("cancel"));
        assert!(step(false).unwrap() == first);
    }
}

#[test]
fn plans_keep_to_their_budget_and_say_why_one_is_too_small() {
    let (_snapshot, out) = container(&Recipe::default());
    let container = Container::open(&out).unwrap();
    for ram in budgets(&container) {
        let plan = plan(&container, &["--memory", "stream", "--ram", &ram]).unwrap();
        assert!(plan.total() <= ram.parse().unwrap(), "{}", plan.summary());
        let Placement::Loaded { keep, .. } = &plan.placement else { panic!("streamed") };
        assert_eq!(keep.iter().all(|k| *k), plan.per_token.dense_read == 0);
    }
    assert_eq!(plan(&container, &["--ram", "60G"]).unwrap().mode, MemoryMode::Mmap);
    let smallest = &budgets(&container)[0];
    assert_eq!(plan(&container, &["--ram", smallest]).unwrap().mode, MemoryMode::Stream);
    let error = plan(&container, &["--ram", "3M"]).unwrap_err().to_string();
    assert!(error.starts_with("a budget of 3.1 MB is too small; needed are at least"), "{error}");
    assert!(error.contains("KDA state") && error.contains("ring of streamed weights"), "{error}");
    let error = plan(&container, &["--ram", smallest, "--memory", "mmap"]).unwrap_err();
    let error = error.downcast_ref::<k3_formats::Error>().unwrap();
    assert!(error.hint_text().unwrap().contains("--memory stream"), "{error}");
}

#[test]
fn truncated_weights_are_an_error_not_an_answer() {
    let (_snapshot, out) = container(&Recipe::default());
    let container = Container::open(&out).unwrap();
    let budgets = budgets(&container);
    for ram in [&budgets[0], &budgets[5]] {
        let mut engine = engine(&container, &["--memory", "stream", "--ram", ram]);
        let mut state = engine.new_state(4);
        let head = out.join("dense-head.safetensors");
        let whole = fs_err::read(&head).unwrap();
        fs_err::OpenOptions::new().write(true).open(&head).unwrap().set_len(8192).unwrap();
        let mut step = || {
            state.reset();
            let mut run = [Run { state: &mut state, rows: 1, want: Want::Last }];
            let cancel = AtomicBool::new(false);
            engine.step(Inputs::Ids(&[7]), &mut run, &cancel, None).map(<[f32]>::to_vec)
        };
        let error = format!("{:#}", step().unwrap_err());
        assert!(error.contains("lm_head.weight in dense-head.safetensors"), "{error}");
        fs_err::write(&head, whole).unwrap();
        assert!(step().unwrap().iter().all(|x| x.is_finite()));
    }
}

/// Waits until the readers have filled the ring, and returns all bytes read by then.
fn settled(engine: &k3_run::engine::Engine<'_>) -> u64 {
    let mut last = engine.dense().bytes_read();
    loop {
        std::thread::sleep(std::time::Duration::from_millis(30));
        match engine.dense().bytes_read() {
            now if now == last => return now,
            now => last = now,
        }
    }
}

#[test]
fn a_token_reads_what_the_plan_says() {
    let (_snapshot, out) = container(&Recipe::default());
    let container = Container::open(&out).unwrap();
    for ram in budgets(&container) {
        let options = ["--memory", "stream", "--ram", &ram, "--expert-cache", "0"];
        let planned = plan(&container, &options).unwrap().per_token.dense_read;
        let mut engine = engine(&container, &options);
        let mut state = engine.new_state(8);
        let mut read = Vec::new();
        for id in 0..4 {
            let mut run = [Run { state: &mut state, rows: 1, want: Want::Last }];
            let cancel = AtomicBool::new(false);
            engine.step(Inputs::Ids(&[id]), &mut run, &cancel, None).unwrap();
            read.push(settled(&engine));
        }
        let per_token: Vec<_> = read.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(per_token, [planned; 3], "a budget of {ram}");
    }
}

#[test]
fn the_release_has_the_known_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let options =
        SynthOptions { dims: Preset::Full.dims(), seed: 0, routing: Routing::Flat, sparse: true };
    write_snapshot(&dir.path().join("full"), &options, &|_| {}).unwrap();
    let config = ModelConfig::read(&dir.path().join("full/config.json")).unwrap();
    let kda = k3_run::state::kda_bytes(&config, 93);
    let mla = k3_run::state::latent_bytes(&config, 93, 131_072, k3_run::state::KvType::F32);
    // Recurrent state and convolutions; latents of 128 Ki tokens.
    assert_eq!(kda, 434_110_464 + 30_523_392);
    assert_eq!(mla, 55_296 * 131_072);
    let expert = k3_formats::tensor_name::expert_bytes(&config);
    assert_eq!(expert * 16 * 92, 25_829_572_608);
    let trunk = |recipe: &Recipe| -> u64 {
        let stored = dense_tensors(&config).into_iter().map(|spec| {
            let format = recipe.format_of(&spec);
            let placed = k3_formats::container::stored_tensors(&spec, format);
            let bytes = |t: &k3_formats::container::layout::Placed| {
                t.shape.iter().product::<usize>() as u64 * t.dtype.bitsize() as u64 / 8
            };
            placed.iter().map(bytes).sum::<u64>()
        });
        stored.sum()
    };
    // The table of the release, but for the embedding, which stays in BF16.
    let kept = 2_348_810_240;
    assert_eq!(trunk(&recipe(16, 16, 16)), 113_509_540_864);
    assert_eq!(trunk(&recipe(8, 8, 8)), 57_626_074_112 - 1_175_060_480 + kept);
    assert_eq!(trunk(&recipe(4, 4, 4)), 33_127_506_944 - 660_602_880 + kept);
    let seed = trunk(&Recipe::default());
    let balanced = trunk(&Recipe::named("balanced").unwrap());
    assert!(balanced <= seed && seed - balanced < 50_000_000, "{balanced} of {seed}");
}

#[test]
fn peaks_stay_within_budgets_even_inside_a_cgroup() {
    let (_snapshot, out) = container(&Recipe::default());
    let container = Container::open(&out).unwrap();
    let ids = (0..60).map(|i| (i * 997 % 39_000).to_string()).collect::<Vec<_>>().join(",");
    let mut want = None;
    let mut check = |options: &[&str]| {
        let plan = plan(&container, &[options, &["--context", "60"]].concat()).unwrap();
        let logits = out.join("logits");
        let mut args = vec!["logits", out.to_str().unwrap(), "--ids", &ids, "--out"];
        args.push(logits.to_str().unwrap());
        args.extend_from_slice(options);
        let limit = (plan.ram < 1 << 40).then_some(plan.ram);
        let measured = measure::run(&args, limit);
        assert!(measured.succeeded, "{options:?} fails in {limit:?} bytes");
        let (peak, total) = (measured.peak, plan.total());
        assert!(peak <= total, "{options:?}: {peak} bytes taken, {total} planned");
        let logits = fs_err::read(logits).unwrap();
        assert!(logits == *want.get_or_insert_with(|| logits.clone()), "{options:?}");
    };
    check(&["--memory", "mmap", "--ram", "2T"]);
    check(&["--memory", "resident", "--ram", "2T"]);
    for ram in budgets(&container) {
        check(&["--memory", "stream", "--ram", &ram, "--expert-cache", "0"]);
    }
}

/// Real dimensions, five layers: set K3_BENCH_CONTAINER to a container made of
/// `k3-prep synth --preset real --layers 5 --experts 48 --vocab 16384`.
#[test]
#[ignore = "reads some 100 GB; `make bench-memory` runs it"]
fn bench_memory() {
    let dir = bench_container();
    let container = Container::open(&dir).unwrap();
    let logits = tempfile::NamedTempFile::new().unwrap();
    let least = |mode| smallest(&container, &["--memory", mode, "--context", "96"]);
    let (streams, keeps) = (least("stream"), least("resident"));
    let steps = (0..8).map(|i| streams + (keeps * 2 - streams) * i / 7);
    let mut cases: Vec<(&str, u64)> = steps.map(|ram| ("stream", ram)).collect();
    for mode in ["mmap", "resident"] {
        cases.extend((0..6).map(|i| (mode, least(mode) + (i << 29))));
    }
    let mut near = std::collections::BTreeMap::new();
    let mut out = std::io::stdout();
    let mut want = None;
    writeln!(out, "| mode | budget MB | planned MB | peak MB | planned / peak | s |").unwrap();
    writeln!(out, "|---|---|---|---|---|---|").unwrap();
    for (mode, ram) in cases {
        let ram = ram.to_string();
        let options = ["--memory", mode, "--ram", &ram];
        let plan = plan(&container, &[&options[..], &["--context", "96"]].concat()).unwrap();
        let measured = run(&dir, logits.path(), &options, 96, Some(plan.ram));
        assert!(measured.succeeded, "{mode} with {ram} bytes fails");
        let (peak, total) = (measured.peak as f64 / 1e6, plan.total() as f64 / 1e6);
        let (ram, ratio) = (plan.ram as f64 / 1e6, total / peak);
        let seconds = measured.seconds;
        writeln!(out, "| {mode} | {ram:.0} | {total:.1} | {peak:.1} | {ratio:.3} | {seconds:.1} |")
            .unwrap();
        assert!(peak <= total, "{mode} with {ram} MB: {peak} of {total} MB");
        *near.entry(mode).or_insert(0) += usize::from(ratio < 1.05);
        let logits = fs_err::read(logits.path()).unwrap();
        assert!(logits == *want.get_or_insert_with(|| logits.clone()), "{mode} {ram}");
    }

    // In the smallest budgets the worst cases that a plan must count weigh more.
    assert!(near.len() == 3 && near.values().all(|&count| count >= 6), "within 5 %: {near:?}");
}

/// Half of the dense weights streamed, all experts cached after the first tokens.
#[test]
#[ignore = "reads some 350 GB; `make bench-memory` runs it"]
fn bench_memory_streamed() {
    let dir = bench_container();
    let container = Container::open(&dir).unwrap();
    let logits = tempfile::NamedTempFile::new().unwrap();
    let run = |options: &[&str], count| run(&dir, logits.path(), options, count, None);
    let half = plan(&container, &["--memory", "resident", "--expert-cache", "4G"]).unwrap();
    let ram = (half.total() - half.dense_bytes / 2).to_string();
    let options = ["--memory", "stream", "--expert-cache", "4G", "--ram", &ram, "--chunk", "1"];
    let planned = plan(&container, &options).unwrap().per_token.dense_read;
    let raw_before = raw_speed(&dir);
    let (few, many) = (run(&options, 96), run(&options, 192));
    let bytes = (many.read - few.read) as f64 / 96.0;
    let seconds = (many.seconds - few.seconds) / 96.0;
    let raw = (raw_before + raw_speed(&dir)) / 2.0;
    writeln!(
        std::io::stdout(),
        "\nhalf streamed: {planned} bytes planned for a token, {bytes:.0} read (kernel's count), \
         {seconds:.3} s, which is {:.2} GB/s; raw direct reads before and after {:.2} GB/s: {:.2} \
         times as long as the bytes alone",
        bytes / seconds / 1e9,
        raw / 1e9,
        seconds * raw / bytes
    )
    .unwrap();
    assert!((bytes / planned as f64 - 1.0).abs() < 0.03);
}

fn bench_container() -> PathBuf {
    std::env::var_os("K3_BENCH_CONTAINER").expect("K3_BENCH_CONTAINER is set").into()
}

/// The logits of `count` tokens with these options.
fn run(
    container: &std::path::Path,
    logits: &std::path::Path,
    options: &[&str],
    count: usize,
    limit: Option<u64>,
) -> measure::Measured {
    let ids: Vec<_> = (0..count).map(|i| ((i * 997 + 5) % 16_000).to_string()).collect();
    let ids = ids.join(",");
    let mut args = vec!["logits", container.to_str().unwrap(), "--ids", &ids, "--out"];
    args.push(logits.to_str().unwrap());
    args.extend_from_slice(options);
    measure::run(&args, limit)
}

/// Bytes per second of direct reads of the container, as `k3-run plan` measures them.
fn raw_speed(container: &std::path::Path) -> f64 {
    let mut plan = std::process::Command::new(crate::support::program());
    let output = plan.arg("plan").arg(container).arg("--json").output().unwrap();
    let facts: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    facts["disk_bytes_per_second"].as_f64().expect("direct reads work")
}

/// The program under observation.
mod measure {
    use std::io::Write;
    use std::path::{Path, PathBuf};
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    /// What a run took.
    pub(super) struct Measured {
        pub(super) succeeded: bool,
        /// Most bytes resident.
        pub(super) peak: u64,
        /// Bytes read from storage.
        pub(super) read: u64,
        pub(super) seconds: f64,
    }

    /// Runs k3-run, inside a memory cgroup of `limit` bytes where one can be made.
    pub(super) fn run(args: &[&str], limit: Option<u64>) -> Measured {
        let group = limit.and_then(Group::new);
        let program = crate::support::program();
        let mut command = match &group {
            Some(group) => {
                let mut shell = Command::new("sh");
                let join = "echo $$ > \"$0\" && exec \"$@\"";
                shell.args(["-c", join]).arg(group.0.join("cgroup.procs")).arg(program);
                shell
            }
            None => Command::new(program),
        };
        let start = Instant::now();
        let mut child =
            command.args(args).env("K3_NO_USAGE", "1").stderr(Stdio::null()).spawn().unwrap();
        let proc = PathBuf::from(format!("/proc/{}", child.id()));
        let (mut peak, mut read) = (0, 0);
        loop {
            let status = field(&proc.join("status"), "State:").unwrap_or_default();
            if let Some(kib) = field(&proc.join("status"), "VmHWM:") {
                peak = peak.max(number(&kib) << 10);
            }
            // Still there until the child is waited for.
            if status.starts_with('Z') {
                read = field(&proc.join("io"), "read_bytes:").map_or(read, |n| number(&n));
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let seconds = start.elapsed().as_secs_f64();
        Measured { succeeded: child.wait().unwrap().success(), peak, read, seconds }
    }

    fn field(file: &Path, name: &str) -> Option<String> {
        let text = std::fs::read_to_string(file).ok()?;
        Some(text.lines().find_map(|line| line.strip_prefix(name))?.trim().to_owned())
    }

    fn number(text: &str) -> u64 {
        text.split(' ').next().unwrap().parse().unwrap()
    }

    /// A memory cgroup (version 1) below this process's own, removed when dropped.
    struct Group(PathBuf);

    impl Group {
        fn new(limit: u64) -> Option<Self> {
            static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
            let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
            let own = groups.lines().find_map(|line| line.split_once(":memory:/"));
            let made = own.and_then(|(_, own)| {
                let name = format!("k3-test-{}-{number}", std::process::id());
                let dir = Path::new("/sys/fs/cgroup/memory").join(own).join(name);
                std::fs::create_dir(&dir).ok()?;
                let group = Self(dir);
                std::fs::write(group.0.join("memory.limit_in_bytes"), limit.to_string()).ok()?;
                Some(group)
            });
            if made.is_none() {
                let note =
                    "note: no memory cgroup (version 1) can be made here; limits are not tried\n";
                let _ = std::io::stderr().write_all(note.as_bytes());
            }
            made
        }
    }

    impl Drop for Group {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir(&self.0);
        }
    }
}
