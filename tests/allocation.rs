//! A decode step takes no memory from the allocator once everything is warm. A test
//! binary of its own, because the counting allocator sees all threads.
#![allow(unsafe_code)] // a global allocator cannot be written without

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use k3_formats::container::Container;
use k3_formats::recipe::Recipe;
use k3_run::engine::{Inputs, Run, Want};

#[path = "support.rs"]
#[expect(dead_code, reason = "the other test binary uses the rest")]
mod support;

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting touches only an
// atomic.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's duties are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above; `ptr` came from `alloc` or `realloc`, so from the system.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_warm_decode_step_allocates_nothing() {
    const STEPS: usize = 40;
    let snapshot = support::TinyK3::new(41);
    let out = snapshot.path("container");
    support::convert(&snapshot.snapshot(), &out, &Recipe::default());
    let container = Container::open(&out).unwrap();
    let cancel = AtomicBool::new(false);
    for options in [
        &["--act8", "experts"][..],
        &["--expert-cache", "0", "--look-ahead", "4"],
        &["--expert-cache", "0", "--threads", "1", "--act8", "on"],
    ] {
        let mut engine = support::engine(&container, options);
        let mut state = engine.new_state(9 * STEPS);
        let mut steps = |count: usize| {
            let before = COUNT.load(Ordering::Relaxed);
            for i in 0..count {
                let mut run = [Run { state: &mut state, rows: 1, want: Want::Last }];
                let ids = [(i * 31 % 700) as u32];
                engine.step(Inputs::Ids(&ids), &mut run, &cancel, None).unwrap();
            }
            COUNT.load(Ordering::Relaxed) - before
        };
        // Slots are reserved when an expert first needs one.
        steps(8 * STEPS);
        let count = steps(STEPS);
        // The queue through which the pool gets a step takes a block for some sixty of them.
        assert!(count <= STEPS / 20, "{options:?}: {count} allocations in {STEPS} steps");
    }
}
