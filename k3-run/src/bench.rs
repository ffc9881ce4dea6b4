//! What this machine makes of the model, against what its memory, disk and cores could do
//! at best: everything measured in one run, round after round, so that ratios hold on a
//! machine that does other things too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k3_formats::container::Container;

use crate::dense::Weight;
use crate::engine::Engine;
use crate::experts::{ExpertStore, FetchLists, Loaded};
use crate::kernels::peak::{Peak, read_bandwidth};
use crate::parallel::Pool;
use crate::trace::Trace;

mod copies;
mod products;
mod report;
mod spread;
mod steps;
mod table;

pub use report::Report;
pub use spread::Spread;

use products::{ProductSeconds, Shape};
use steps::{Sequence, Steps};

/// Reads in flight that are tried.
const IN_FLIGHT: [usize; 4] = [1, 2, 4, 8];

/// Experts read in one measurement of the disk.
const EXPERTS_READ: usize = 24;

/// Experts whose matrices are multiplied.
const EXPERTS_MULTIPLIED: usize = 16;

/// Bytes read in one measurement of the memory, more than caches hold, slice by slice: the
/// best slice counts, because on a busy machine few are left alone.
const MEMORY_BYTES: usize = 512 << 20;
const MEMORY_SLICE: usize = 32 << 20;

/// What to measure.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// Rounds at most.
    pub rounds: usize,
    /// No further round begins when it would end after this time; one always runs.
    pub time: Duration,
    /// Tokens decoded in each round, with each of the two stores.
    pub tokens: usize,
    /// Lengths of prompts.
    pub prompts: Vec<usize>,
    /// Positions that every sequence has before its text.
    pub depth: usize,
}

/// One round of measurements; rates per second.
struct Round {
    /// Bytes read from memory.
    memory: f64,
    peak: Peak,
    /// Bytes read from the drive, for each of [`IN_FLIGHT`].
    disk: [f64; IN_FLIGHT.len()],
    products: Vec<ProductSeconds>,
    /// With experts cached as the engine was told, and with as good as none.
    decode: [Decoded; 2],
    /// For each prompt.
    prefill: Vec<Steps>,
}

/// Decoding, and the rate of the drive just before and after.
struct Decoded {
    steps: Steps,
    disk: f64,
}

/// An engine and all that is measured with it.
pub struct Bench<'e, 'a> {
    engine: &'e mut Engine<'a>,
    /// Keeps as good as no experts.
    uncached: ExpertStore,
    container: &'e Container,
    text: &'e [u32],
    options: BenchOptions,
    memory: Vec<u8>,
    /// One thread.
    single: Pool,
    trace: Arc<Trace>,
}

impl<'e, 'a> Bench<'e, 'a> {
    /// For an engine whose experts are cached as it was told; `uncached` is a store that
    /// keeps as good as none. `text` is what is taken in and continued.
    ///
    /// # Errors
    /// The system refuses to start a thread.
    ///
    /// # Panics
    /// There is no text.
    pub fn new(
        engine: &'e mut Engine<'a>,
        uncached: ExpertStore,
        container: &'e Container,
        text: &'e [u32],
        options: BenchOptions,
    ) -> anyhow::Result<Self> {
        assert!(!text.is_empty(), "something to take in");
        let (memory, trace) = (vec![1; MEMORY_BYTES], Arc::new(Trace::new()));
        let single = Pool::new(1)?;
        Ok(Self { engine, uncached, container, text, options, memory, single, trace })
    }

    /// Measures, round after round.
    ///
    /// # Errors
    /// A read fails.
    pub fn run(&mut self) -> anyhow::Result<Report> {
        let begin = Instant::now();
        let more = 1 + self.options.rounds * self.options.tokens;
        let mut sequences =
            [(); 2].map(|()| Sequence::new(self.engine, self.options.depth, self.text, more));
        // Takes the text in, and fills caches.
        sequences[0].measure(self.engine, 1, &self.trace)?;
        self.swap_stores();
        let filled = sequences[1].measure(self.engine, 1, &self.trace);
        self.swap_stores();
        filled?;
        let mut rounds = Vec::new();
        let (mut shapes, first) = (Vec::new(), Instant::now());
        while rounds.len() < self.options.rounds {
            let one = first.elapsed() / rounds.len().max(1) as u32;
            if !rounds.is_empty() && begin.elapsed() + one > self.options.time {
                break;
            }
            rounds.push(self.round(rounds.len(), &mut sequences, &mut shapes)?);
        }
        Ok(Report::new(self.engine, &self.uncached, &shapes, &rounds, &self.options.prompts))
    }

    /// The spans of the last round.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    fn round(
        &mut self,
        number: usize,
        sequences: &mut [Sequence; 2],
        shapes: &mut Vec<Shape>,
    ) -> anyhow::Result<Round> {
        self.trace = Arc::new(Trace::new());
        let experts = self.some_experts(number, EXPERTS_READ);
        let drive = |bench: &Self, in_flight| {
            let store = bench.engine.experts();
            store.raw_read_rate(bench.container, &experts, in_flight)
        };
        let mut disk = [0.0; IN_FLIGHT.len()];
        for (rate, in_flight) in disk.iter_mut().zip(IN_FLIGHT) {
            *rate = drive(self, in_flight)?;
        }
        let products = self.products(shapes)?;
        let cached = sequences[0].measure(self.engine, self.options.tokens, &self.trace)?;
        let memory = self.memory_rate();
        let before = drive(self, IN_FLIGHT[2])?;
        self.swap_stores();
        let uncached = sequences[1].measure(self.engine, self.options.tokens, &self.trace);
        self.swap_stores();
        let after = drive(self, IN_FLIGHT[2])?;
        let memory = memory.max(self.memory_rate());
        let mut prefill = Vec::with_capacity(self.options.prompts.len());
        for &length in &self.options.prompts {
            let prompt: Vec<u32> = self.text.iter().copied().cycle().take(length).collect();
            let mut sequence = Sequence::new(self.engine, self.options.depth, &prompt, 0);
            prefill.push(sequence.measure(self.engine, 1, &self.trace)?);
        }
        Ok(Round {
            memory,
            peak: Peak::measure(self.engine.numerics().kernels, self.engine.pool()),
            disk,
            products,
            decode: [
                Decoded { steps: cached, disk: before },
                Decoded { steps: uncached?, disk: f64::midpoint(before, after) },
            ],
            prefill,
        })
    }

    fn swap_stores(&mut self) {
        self.engine.swap_experts(&mut self.uncached);
    }

    fn memory_rate(&self) -> f64 {
        let (kernels, pool) = (self.engine.numerics().kernels, self.engine.pool());
        let slices = self.memory.chunks(MEMORY_SLICE);
        slices.map(|slice| read_bandwidth(kernels, pool, slice)).fold(0.0, f64::max)
    }

    /// (layer, expert): others in every round, spread over the model.
    fn some_experts(&self, round: usize, count: usize) -> Vec<(usize, usize)> {
        let config = &self.container.config;
        let (layers, all) = (config.moe_layers(), config.moe.experts);
        let number = |i: usize| (round * count + i) * 7919 % (layers.len() * all);
        (0..count).map(number).map(|n| (layers.start + n / all, n % all)).collect()
    }

    /// Seconds of the products at each shape; lists the shapes the first time.
    fn products(&self, shapes: &mut Vec<Shape>) -> anyhow::Result<Vec<ProductSeconds>> {
        let (engine, layer) = (&*self.engine, self.container.config.moe_layers().start);
        let dense = engine.dense();
        let names = dense.matrices().iter().map(|matrix| &matrix.name);
        let weights: Vec<Weight> =
            names.map(|name| dense.weight(name)).collect::<anyhow::Result<_>>()?;
        let experts: Vec<usize> =
            (0..self.container.config.moe.experts.min(EXPERTS_MULTIPLIED)).collect();
        let (mut lists, mut loaded) = (FetchLists::default(), Vec::new());
        let store = engine.experts();
        let mut fetch = store.fetch(self.container, layer, &experts, &mut lists);
        let mut seconds = Vec::new();
        while loaded.len() < experts.len().min(store.size().slots) {
            let mut ready: Vec<Loaded> = Vec::new();
            fetch.ready(&mut ready, experts.len(), true)?;
            loaded.append(&mut ready);
        }
        for group in products::group(engine.numerics(), &weights, &loaded) {
            if !shapes.contains(&group.shape) {
                shapes.push(group.shape);
            }
            seconds.push(group.seconds(engine, &self.single));
        }
        fetch.give_back(&mut loaded);
        Ok(seconds)
    }
}
