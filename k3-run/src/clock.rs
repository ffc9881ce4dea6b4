//! Where the time of a step goes, by part of the model. Costs nothing while it is off.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::trace::{Lane, Span, Trace};

/// Parts of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Embedding, AttnRes mixes and norms.
    Mix,
    /// KDA or MLA.
    Attention,
    /// Router and, where it pays, the next one for a guess.
    Router,
    /// Dense FFN, shared experts, and the projections into and out of the latent.
    Dense,
    /// Routed experts.
    Experts,
    /// Standing still for want of an expert.
    Wait,
    /// Projection to the vocabulary.
    Head,
}

impl Part {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 7] = [
        Self::Mix,
        Self::Attention,
        Self::Router,
        Self::Dense,
        Self::Experts,
        Self::Wait,
        Self::Head,
    ];

    /// Its name in tables and traces.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mix => "mix",
            Self::Attention => "attention",
            Self::Router => "router",
            Self::Dense => "dense",
            Self::Experts => "experts",
            Self::Wait => "expert wait",
            Self::Head => "head",
        }
    }
}

/// Time of each part, by its number in [`Part::ALL`].
pub type PartTimes = [Duration; Part::ALL.len()];

/// Measures the parts of steps while it runs.
#[derive(Debug, Default)]
pub struct Clock(Option<Box<Running>>);

#[derive(Debug)]
struct Running {
    last: Instant,
    times: PartTimes,
    trace: Option<Arc<Trace>>,
}

impl Clock {
    /// Starts from zero; spans go to `trace` too.
    pub fn start(&mut self, trace: Option<Arc<Trace>>) {
        let times = PartTimes::default();
        self.0 = Some(Box::new(Running { last: Instant::now(), times, trace }));
    }

    /// Stops, and tells the time of each part since the start.
    pub fn stop(&mut self) -> PartTimes {
        self.0.take().map(|running| running.times).unwrap_or_default()
    }

    /// A step begins: what was before belongs to no part.
    pub(crate) fn begin(&mut self) {
        if let Some(running) = &mut self.0 {
            running.last = Instant::now();
        }
    }

    /// Everything since the last call was `part` of `layer`.
    pub(crate) fn lap(&mut self, part: Part, layer: usize) {
        if let Some(running) = &mut self.0 {
            let start = std::mem::replace(&mut running.last, Instant::now());
            running.times[part as usize] += running.last - start;
            if let Some(trace) = &running.trace {
                let (name, lane) = (part.name(), Lane::Compute);
                trace.add(Span { name, lane, start, layer, expert: None, bytes: 0 });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laps_add_up_and_parts_are_numbered_in_order() {
        for (i, part) in Part::ALL.into_iter().enumerate() {
            assert_eq!(part as usize, i);
        }
        let mut clock = Clock::default();
        clock.lap(Part::Head, 0);
        assert_eq!(clock.stop(), PartTimes::default());
        let begun = Instant::now();
        clock.start(None);
        std::thread::sleep(Duration::from_millis(2));
        clock.begin();
        clock.lap(Part::Mix, 0);
        std::thread::sleep(Duration::from_millis(2));
        clock.lap(Part::Wait, 1);
        let times = clock.stop();
        assert!(times[Part::Wait as usize] >= Duration::from_millis(2));
        assert!(times.iter().sum::<Duration>() <= begun.elapsed() - Duration::from_millis(2));
        assert_eq!(clock.stop(), PartTimes::default());
    }
}
