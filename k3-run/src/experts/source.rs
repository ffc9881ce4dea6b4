//! From an expert's place to reads, and the threads that do them.

use std::io;
use std::sync::Arc;

use k3_formats::expert_table::ExpertEntry;
use k3_formats::tensor_name::ExpertPart;

use super::Shared;
use super::books::Urgency;
use super::buffer::{ExpertBuffer, ExpertShape, Piece};
use super::cache::Key;
use super::places::Places;
use super::shards::{DIRECT_ALIGN, Shards};
use crate::trace::{Lane, Span};

/// One positioned read into a piece of a slot.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) slot: usize,
    pub(super) key: Key,
    shard: usize,
    offset: u64,
    /// Bytes of the piece that must be there; the rest only makes a block whole.
    needed: usize,
    /// Bytes of the expert among them.
    bytes: usize,
    direct: bool,
    piece: Piece,
}

/// The shards, or banks, and how they are read.
pub(super) struct Source {
    pub(super) shards: Shards,
    pub(super) places: Places,
    pub(super) shape: ExpertShape,
    /// Bytes of one read. Less than an expert: experts land one after another while
    /// several reads are in flight, and a wrong guess is given up half way.
    pub(super) read_bytes: usize,
    /// CRC-32 of every expert by its key, if each is to be checked as it lands.
    pub(super) checksums: Option<Box<[u32]>>,
}

impl Source {
    /// The reads that fill `buffer` with the expert at `entry`, in file order: pieces of
    /// about `read_bytes` of one run, or its six parts where they lie apart.
    pub(super) fn jobs(
        &self,
        (slot, key): (usize, Key),
        entry: &ExpertEntry,
        read_bytes: usize,
        buffer: &mut Arc<ExpertBuffer>,
        mut take: impl FnMut(Job),
    ) {
        let bytes = self.shape.bytes();
        let Some((shard, offset)) = entry.run() else {
            let ends = ExpertPart::ALL.map(|part| self.shape.range(part).end);
            let mut parts = ExpertPart::ALL.into_iter();
            return ExpertBuffer::cut(buffer, 0, ends.into_iter(), |piece| {
                let (shard, offset) = entry.part(parts.next().expect("one piece for each part"));
                let bytes = piece.range().len();
                let needed = bytes;
                take(Job { slot, key, shard, offset, needed, bytes, direct: false, piece });
            });
        };
        let direct = self.shards.is_direct(shard);
        let start = if direct { (offset % DIRECT_ALIGN as u64) as usize } else { 0 };
        let end = start + bytes;
        let window = if direct { end.next_multiple_of(DIRECT_ALIGN) } else { end };
        let step = window.div_ceil(window.div_ceil(read_bytes)).next_multiple_of(DIRECT_ALIGN);
        let ends = (step..window + step).step_by(step).map(|end| end.min(window));
        ExpertBuffer::cut(buffer, start, ends, |piece| {
            let range = piece.range();
            let offset = offset - start as u64 + range.start as u64;
            let needed = range.end.min(end) - range.start;
            let bytes = range.end.min(end) - range.start.max(start);
            take(Job { slot, key, shard, offset, needed, bytes, direct, piece });
        });
    }

    pub(super) fn read(&self, job: &mut Job) -> io::Result<()> {
        let buf = job.piece.bytes_mut();
        self.shards.read(job.shard, job.direct, buf, job.offset, job.needed)
    }
}

/// Does reads until the store closes; `reader` is the number of this thread.
pub(super) fn read_jobs(shared: &Shared, reader: usize) {
    let mut books = shared.lock();
    while !books.closing {
        let Some((mut job, urgency)) = books.next_job(&shared.source) else {
            books = shared.jobs.wait(books).unwrap_or_else(std::sync::PoisonError::into_inner);
            continue;
        };
        let span = books.trace.clone().map(|trace| (trace, std::time::Instant::now()));
        drop(books);
        let result = shared.source.read(&mut job);
        let checksum = shared.source.checksums.as_ref();
        let checksum = checksum.map(|all| (job.piece.checksum(), all[job.key as usize]));
        let Job { slot, key, bytes, piece, .. } = job;
        drop(piece); // before anyone can see that the slot is complete
        if let Some((trace, start)) = span {
            let (layer, expert) = shared.place(key);
            let name = match urgency {
                Urgency::Demand => "read",
                Urgency::Early => "read early",
                Urgency::Warm => "warm start",
            };
            let lane = Lane::Disk(reader);
            let expert = Some(expert);
            trace.add(Span { name, lane, start, layer, expert, bytes: bytes as u64 });
        }
        books = shared.lock();
        if books.end_read(slot, bytes, urgency, result, checksum) {
            shared.landed.notify_all();
        }
    }
}
