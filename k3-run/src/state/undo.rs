//! The way back over the last tokens of a KDA layer: an older state and the inputs that
//! led on from there.
//!
//! Going back copies the older state and takes the inputs in again, up to the wanted
//! token. That is the recurrence alone, without a matrix product, by the code that ran
//! the first time: the result has the same bits. The older state is renewed once the
//! record is full, right before the layer reads the state anyway.

use k3_formats::config::KdaConfig;

use crate::parallel::{Chunks, for_each};

/// What enters the recurrence of a layer: projections of some rows, row-major.
#[derive(Debug, Clone, Copy)]
pub struct KdaInputs<'a> {
    /// Before the convolutions, [rows, width] each.
    pub q: &'a [f32],
    /// See `q`.
    pub k: &'a [f32],
    /// See `q`.
    pub v: &'a [f32],
    /// Logits of the decay, [rows, width].
    pub decay: &'a [f32],
    /// Logits of the write strength, [rows, heads].
    pub beta: &'a [f32],
}

impl<'a> KdaInputs<'a> {
    /// q, k, v, decay and beta.
    pub fn parts(&self) -> [&'a [f32]; 5] {
        [self.q, self.k, self.v, self.decay, self.beta]
    }

    /// The same with only its rows `from..to`, if there are `rows` of them.
    pub fn rows(&self, rows: usize, range: std::ops::Range<usize>) -> Self {
        let [q, k, v, decay, beta] = self.parts().map(|part| {
            let row = part.len() / rows;
            &part[range.start * row..range.end * row]
        });
        Self { q, k, v, decay, beta }
    }
}

/// Undo record of one KDA layer.
#[derive(Debug)]
pub struct KdaUndo {
    /// Position of the older state; none before the first step and after a jump.
    first: Option<usize>,
    conv: [Vec<f32>; 3],
    memory: Vec<f32>,
    /// Values of one head's memory.
    head: usize,
    /// Room of the record in rows, and rows in it: those that follow `first`.
    capacity: usize,
    recorded: usize,
    /// q, k, v, decay and beta of the recorded rows.
    inputs: [Vec<f32>; 5],
    /// Position of the live state.
    at: usize,
}

impl KdaUndo {
    /// A record with room for `rows` tokens of a layer that is at `position`.
    pub(super) fn new(config: &KdaConfig, rows: usize, position: usize) -> Self {
        let past = (config.conv_width - 1) * config.width();
        let wide = || vec![0.0; rows * config.width()];
        let beta = vec![0.0; rows * config.heads];
        Self {
            first: None,
            conv: std::array::from_fn(|_| vec![0.0; past]),
            memory: vec![0.0; config.width() * config.head_dim],
            head: config.head_dim * config.head_dim,
            capacity: rows,
            recorded: 0,
            inputs: [wide(), wide(), wide(), wide(), beta],
            at: position,
        }
    }

    /// Values recorded per token.
    pub(super) fn row_values(config: &KdaConfig) -> usize {
        4 * config.width() + config.heads
    }

    /// Notes what is about to happen to the state `conv`, `memory`: `rows` tokens enter.
    pub fn before_step(
        &mut self,
        conv: &[Vec<f32>; 3],
        memory: &mut [f32],
        inputs: KdaInputs<'_>,
        rows: usize,
    ) {
        let gapless = self.first.is_some_and(|first| first + self.recorded == self.at);
        if !gapless || self.recorded + rows > self.capacity {
            self.conv.iter_mut().zip(conv).for_each(|(old, new)| old.copy_from_slice(new));
            copy(memory, &mut self.memory, self.head);
            (self.first, self.recorded) = (Some(self.at), 0);
        }
        if self.recorded + rows <= self.capacity {
            for (record, new) in self.inputs.iter_mut().zip(inputs.parts()) {
                let row = record.len() / self.capacity;
                record[self.recorded * row..][..new.len()].copy_from_slice(new);
            }
            self.recorded += rows;
        }
        self.at += rows;
    }

    /// The deepest position up to `limit` that can be gone back to.
    pub(super) fn reach(&self, limit: usize) -> Option<usize> {
        if self.at <= limit {
            return Some(self.at);
        }
        let first = self.first.filter(|&first| first <= limit)?;
        Some(limit.min(first + self.recorded))
    }

    /// Puts the older state in place and returns the inputs that lead from there to
    /// `position`, and their number; nothing if the state is at `position`.
    ///
    /// # Panics
    /// The record does not reach back that far.
    pub fn rewind(
        &mut self,
        position: usize,
        conv: &mut [Vec<f32>; 3],
        memory: &mut [f32],
    ) -> Option<(KdaInputs<'_>, usize)> {
        assert_eq!(self.reach(position), Some(position), "a position on record");
        if position == self.at {
            return None;
        }
        conv.iter_mut().zip(&self.conv).for_each(|(new, old)| new.copy_from_slice(old));
        copy(&mut self.memory, memory, self.head);
        self.recorded = self.first.map_or(0, |first| position - first);
        self.at = position;
        let [q, k, v, decay, beta] = self.inputs.each_ref().map(|record| {
            let row = record.len() / self.capacity;
            &record[..self.recorded * row]
        });
        Some((KdaInputs { q, k, v, decay, beta }, self.recorded))
    }

    /// The state is now that of `position`, by other means.
    pub(super) fn forget(&mut self, position: usize) {
        (self.first, self.recorded, self.at) = (None, 0, position);
    }
}

/// Copies heads on all threads.
fn copy(from: &mut [f32], to: &mut [f32], head: usize) {
    for_each((Chunks::new(to, head), Chunks::new(from, head)), 1, |_, (to, from)| {
        to.into_slice().copy_from_slice(from.into_slice());
    });
}
