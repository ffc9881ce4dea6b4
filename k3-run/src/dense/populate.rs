//! Background prefetch of mapped weights: populate reads in execution order.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use k3_formats::container::Container;
use k3_formats::mapping::Mapping;

use super::DenseMatrix;

/// Bytes of one populate read: long enough for large reads from the disk, short enough
/// that a shutdown does not wait.
const STRIDE: usize = 4 << 20;

const PAGE: usize = 4096;

/// The ranges to bring in, and the thread that does.
pub(super) struct Populate {
    ranges: Vec<(Arc<Mapping>, Range<usize>)>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Populate {
    /// Will bring in `limit` bytes of the matrices, the first ones used first.
    pub(super) fn new(container: &Container, matrices: &[DenseMatrix], limit: u64) -> Self {
        let mut left = limit;
        let mut ranges: Vec<(Arc<Mapping>, Range<usize>)> = Vec::new();
        for matrix in matrices.iter().take_while(|m| {
            let fits = m.bytes() <= left;
            left = left.saturating_sub(m.bytes());
            fits
        }) {
            let place = &matrix.place;
            let map = &container.dense_files()[place.file].map;
            let end = place.codes.end.max(place.scales.end) as usize;
            let start = place.codes.start as usize / PAGE * PAGE;
            for start in (start..end).step_by(STRIDE) {
                ranges.push((Arc::clone(map), start..end.min(start + STRIDE)));
            }
        }
        Self { ranges, stop: Arc::new(AtomicBool::new(false)), thread: None }
    }

    /// Starts the thread, once, which calls `then` at its end. Without it, pages come in when
    /// they are first used.
    pub(super) fn start(&mut self, then: impl FnOnce() + Send + 'static) {
        if self.ranges.is_empty() {
            return;
        }
        let (ranges, stop) = (std::mem::take(&mut self.ranges), Arc::clone(&self.stop));
        let work = move || {
            for (map, range) in ranges {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                map.populate(range);
            }
            then();
        };
        // Only speed is lost where no thread can be started.
        self.thread = std::thread::Builder::new().name("k3-populate".into()).spawn(work).ok();
    }
}

impl Drop for Populate {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
