//! Threads: one resident pool, and the ways to spread work over it. Nothing else in
//! this crate imports rayon.
//!
//! A decode step runs wholly inside one [`Pool::install`]; in there [`join`] and
//! [`for_each`] cost well under a microsecond. Work is split into disjoint parts by
//! value, so no index is ever shared, and a result never depends on who computed it.
#![allow(unsafe_code)] // `Columns` hands disjoint strided parts of one slice to several threads

use std::marker::PhantomData;
use std::ptr::NonNull;

use anyhow::Context;

/// The engine's threads.
pub struct Pool {
    pool: rayon::ThreadPool,
}

impl Pool {
    /// Starts `threads` resident threads (at least one).
    ///
    /// # Errors
    /// The system refuses to start a thread.
    pub fn new(threads: usize) -> anyhow::Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|i| format!("k3-{i}"))
            .build()
            .with_context(|| format!("cannot start {threads} threads"))?;
        Ok(Self { pool })
    }

    /// Runs `work` on the pool and waits for it.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}

/// Runs both, possibly at the same time, on the pool this thread belongs to.
pub fn join(a: impl FnOnce() + Send, b: impl FnOnce() + Send) {
    rayon::join(a, b);
}

/// Number of threads of the pool this thread belongs to.
pub(crate) fn current_threads() -> usize {
    rayon::current_num_threads()
}

/// A number of equal items that can be cut in two.
pub trait Split: Send + Sized {
    /// How many items are left.
    fn items(&self) -> usize;
    /// The first `mid` items and the rest.
    fn split_at(self, mid: usize) -> (Self, Self);
}

/// Calls `work(first, part)` on the pool for consecutive parts of at most `grain` items;
/// `first` is the index of the part's first item.
pub fn for_each<P: Split>(parts: P, grain: usize, work: impl Fn(usize, P) + Sync) {
    fn cut<P: Split>(first: usize, part: P, grain: usize, work: &(impl Fn(usize, P) + Sync)) {
        let len = part.items();
        if len <= grain {
            if len > 0 {
                work(first, part);
            }
            return;
        }
        let mid = len / 2;
        let (left, right) = part.split_at(mid);
        rayon::join(|| cut(first, left, grain, work), || cut(first + mid, right, grain, work));
    }
    cut(0, parts, grain.max(1), &work);
}

/// A slice as items of `size` consecutive elements.
pub struct Chunks<'a, T> {
    slice: &'a mut [T],
    size: usize,
}

impl<'a, T> Chunks<'a, T> {
    /// # Panics
    /// `size` is zero or does not divide the slice.
    pub fn new(slice: &'a mut [T], size: usize) -> Self {
        assert!(size > 0 && slice.len().is_multiple_of(size), "whole items");
        Self { slice, size }
    }

    /// The elements of all items left.
    pub fn into_slice(self) -> &'a mut [T] {
        self.slice
    }
}

impl<T: Send> Split for Chunks<'_, T> {
    fn items(&self) -> usize {
        self.slice.len() / self.size
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (left, right) = self.slice.split_at_mut(mid * self.size);
        (Self { slice: left, size: self.size }, Self { slice: right, size: self.size })
    }
}

/// A range of indices, for work that writes through something else.
impl Split for std::ops::Range<usize> {
    fn items(&self) -> usize {
        self.len()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let middle = self.start + mid;
        (self.start..middle, middle..self.end)
    }
}

impl<A: Split, B: Split> Split for (A, B) {
    fn items(&self) -> usize {
        self.0.items().min(self.1.items())
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (a, b) = (self.0.split_at(mid), self.1.split_at(mid));
        ((a.0, b.0), (a.1, b.1))
    }
}

impl<A: Split, B: Split, C: Split> Split for (A, B, C) {
    fn items(&self) -> usize {
        self.0.items().min(self.1.items()).min(self.2.items())
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (a, b, c) = (self.0.split_at(mid), self.1.split_at(mid), self.2.split_at(mid));
        ((a.0, b.0, c.0), (a.1, b.1, c.1))
    }
}

/// A range of columns of a row-major `[tokens, width]` matrix, exclusively borrowed.
///
/// Splitting gives disjoint column ranges, which several threads may fill at once. As a
/// [`Split`], an item is `unit` columns, for instance one head.
pub struct Columns<'a> {
    /// First column of the range in the first token's row.
    base: NonNull<f32>,
    tokens: usize,
    /// Elements from one token's row to the next.
    stride: usize,
    width: usize,
    unit: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `Columns` is an exclusive borrow of the elements it can reach, like
// `&mut [f32]`, which is `Send`; no two of them reach the same element.
unsafe impl Send for Columns<'_> {}

impl<'a> Columns<'a> {
    /// All columns of `matrix: [tokens, width]`.
    ///
    /// # Panics
    /// `matrix` does not divide into `tokens` rows.
    pub fn new(matrix: &'a mut [f32], tokens: usize) -> Self {
        Self::with_unit(matrix, tokens, 1)
    }

    /// Like [`Columns::new`], in items of `unit` columns.
    ///
    /// # Panics
    /// `matrix` does not divide into `tokens` rows of whole units.
    pub fn with_unit(matrix: &'a mut [f32], tokens: usize, unit: usize) -> Self {
        assert!(tokens > 0 && matrix.len().is_multiple_of(tokens), "whole rows");
        let width = matrix.len() / tokens;
        assert!(unit > 0 && width.is_multiple_of(unit), "whole units");
        let base = NonNull::from(matrix).cast();
        Self { base, tokens, stride: width, width, unit, lifetime: PhantomData }
    }

    /// Number of rows.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of columns in this range.
    pub fn width(&self) -> usize {
        self.width
    }

    /// This range's part of one token's row, `[width]`.
    ///
    /// # Panics
    /// There is no such token.
    pub fn row_mut(&mut self, token: usize) -> &mut [f32] {
        assert!(token < self.tokens, "token in range");
        // SAFETY: `base` came from a borrow of `tokens` rows of `stride` elements and was
        // advanced by the columns left of this range, so that the `width` elements at
        // `token * stride` lie inside that borrow for `token < tokens`. Only this value
        // reaches them (`split_at` consumes its input and gives disjoint ranges), and
        // `&mut self` keeps the slice the only one alive.
        unsafe {
            let start = self.base.add(token * self.stride);
            std::slice::from_raw_parts_mut(start.as_ptr(), self.width)
        }
    }

    /// This range's part of one token's row, `[width]`.
    ///
    /// # Panics
    /// There is no such token.
    pub fn row(&self, token: usize) -> &[f32] {
        assert!(token < self.tokens, "token in range");
        // SAFETY: in bounds as in `row_mut`; only this value reaches these elements, and
        // `&self` keeps it from handing out a mutable part meanwhile.
        unsafe {
            let start = self.base.add(token * self.stride);
            std::slice::from_raw_parts(start.as_ptr(), self.width)
        }
    }

    /// The first `left` columns and the others.
    ///
    /// # Panics
    /// There are fewer.
    pub fn split_columns(self, left: usize) -> (Self, Self) {
        assert!(left <= self.width, "split inside the range");
        // SAFETY: `left <= width`, so the pointer stays inside the first token's row or
        // one past its end.
        let base = unsafe { self.base.add(left) };
        (Self { width: left, ..self }, Self { base, width: self.width - left, ..self })
    }

    /// The same columns for a shorter time.
    pub fn reborrow(&mut self) -> Columns<'_> {
        Columns { lifetime: PhantomData, ..*self }
    }
}

impl Split for Columns<'_> {
    fn items(&self) -> usize {
        self.width / self.unit
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let left = mid * self.unit;
        self.split_columns(left)
    }
}

/// Threads to use unless told otherwise: one per physical core this process may run on,
/// within its cgroup's CPU quota.
pub fn default_threads() -> usize {
    // The standard library minds affinity and cgroup quotas, but counts hardware threads.
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    usable.min(physical_cores().unwrap_or(usable)).max(1)
}

/// Cores among the allowed CPUs, counting the hardware threads of a core once.
fn physical_cores() -> Option<usize> {
    let allowed = rustix::thread::sched_getaffinity(None).ok()?;
    let mut cores = std::collections::HashSet::new();
    for cpu in (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)) {
        let topology = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
        cores.insert(fs_err::read_to_string(format!("{topology}/thread_siblings_list")).ok()?);
    }
    Some(cores.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_visited_once_with_its_index() {
        let pool = Pool::new(3).unwrap();
        for (items, grain) in [(0, 1), (1, 1), (7, 1), (64, 5), (65, 100)] {
            let mut seen = vec![0_usize; items * 2];
            pool.install(|| {
                for_each((Chunks::new(&mut seen, 2), 0..items), grain, |first, (part, range)| {
                    assert_eq!(first, range.start);
                    assert!(range.len() <= grain);
                    for (i, item) in part.into_slice().chunks_mut(2).enumerate() {
                        item[0] += first + i + 1;
                        item[1] += 1;
                    }
                });
            });
            let expected: Vec<_> = (0..items).flat_map(|i| [i + 1, 1]).collect();
            assert_eq!(seen, expected);
        }
    }

    #[test]
    fn columns_are_disjoint_and_cover_the_matrix() {
        let (tokens, heads, dim) = (3, 5, 4);
        let mut matrix = vec![0.0; tokens * heads * dim];
        Pool::new(2).unwrap().install(|| {
            let columns = Columns::with_unit(&mut matrix, tokens, dim);
            for_each(columns, 1, |head, mut columns| {
                assert_eq!((columns.tokens(), columns.width()), (tokens, dim));
                for token in 0..tokens {
                    for (d, value) in columns.row_mut(token).iter_mut().enumerate() {
                        *value += ((token * heads + head) * dim + d) as f32;
                    }
                }
            });
        });
        let expected: Vec<_> = (0..matrix.len()).map(|i| i as f32).collect();
        assert_eq!(matrix, expected);
    }

    #[test]
    fn at_least_one_thread_and_no_more_than_the_system_allows() {
        let threads = default_threads();
        assert!(threads >= 1 && threads <= std::thread::available_parallelism().unwrap().get());
        assert_eq!(Pool::new(0).unwrap().threads(), 1);
    }
}
