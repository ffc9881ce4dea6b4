//! How fast the drive gives experts, when nothing else is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use k3_formats::container::Container;

use super::ExpertStore;
use super::buffer::ExpertBuffer;

impl ExpertStore {
    /// Reads each of `experts` (layer, expert), one read each and `in_flight` at a time,
    /// past the cache. Returns bytes per second.
    ///
    /// # Errors
    /// A read fails, or there is no memory.
    pub fn raw_read_rate(
        &self,
        container: &Container,
        experts: &[(usize, usize)],
        in_flight: usize,
    ) -> std::io::Result<f64> {
        let (source, next) = (&self.shared.source, AtomicUsize::new(0));
        let mut buffers = Vec::with_capacity(in_flight);
        for _ in 0..in_flight {
            buffers.push(Arc::new(ExpertBuffer::new(source.shape)?));
        }
        let read = |buffer: &mut Arc<ExpertBuffer>| -> std::io::Result<()> {
            while let Some(&(layer, expert)) = experts.get(next.fetch_add(1, Ordering::Relaxed)) {
                let entry = source.places.entry(container, layer, expert);
                let mut jobs = Vec::with_capacity(6);
                source.jobs((0, 0), &entry, usize::MAX, buffer, |job| jobs.push(job));
                jobs.iter_mut().try_for_each(|job| source.read(job))?;
            }
            Ok(())
        };
        // The first use of a page costs more than a read.
        for buffer in &mut buffers {
            next.store(experts.len().saturating_sub(1), Ordering::Relaxed);
            read(buffer)?;
        }
        next.store(0, Ordering::Relaxed);
        let start = Instant::now();
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                buffers.iter_mut().map(|buffer| scope.spawn(|| read(buffer))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().try_for_each(join)
        })?;
        Ok((experts.len() * self.expert_bytes()) as f64 / start.elapsed().as_secs_f64())
    }
}
