//! The memory budget: plans, refusals, and equal results in every mode and budget.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use k3_formats::container::Container;
use k3_formats::recipe::Recipe;
use k3_run::cli::Act8;
use k3_run::dense::Placement;
use k3_run::engine::{Inputs, Run, Want};
use k3_run::memory::{MemoryMode, MemoryPlan};
use k3_run::open;

use crate::support::{TinyK3, convert, engine, engine_args};

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

/// Budgets from the smallest that streams to one that keeps everything.
fn budgets(container: &Container) -> Vec<String> {
    let options = ["--memory", "stream", "--expert-cache", "0"];
    let least = plan(container, &[&options[..], &["--ram", "0"]].concat()).unwrap_err();
    let hint = least.downcast_ref::<k3_formats::Error>().unwrap().hint_text().unwrap();
    let smallest = hint.split_once("--ram ").unwrap().1.split_once('M').unwrap().0;
    let smallest: u64 = smallest.parse::<u64>().unwrap() << 20;
    let all = plan(container, &["--memory", "resident", "--expert-cache", "0"]).unwrap().total();
    (0..6).map(|i| (smallest + (all - smallest) * i / 5).to_string()).collect()
}

#[test]
fn logits_are_the_same_in_every_mode_and_budget() {
    let (_snapshot, out) = container(&Recipe { bits: 4, mla_bits: 8, head_bits: 16 });
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
