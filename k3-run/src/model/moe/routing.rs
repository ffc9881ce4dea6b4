//! The router's choice: which experts each row gets, and which rows each expert gets.

use std::ops::Range;

use k3_formats::config::MoeConfig;

use crate::kernels::Kernels;
use crate::parallel::{Chunks, for_each};

/// How the router chooses, beside its scores.
#[derive(Clone, Copy)]
pub(super) struct Rule<'a> {
    pub(super) kernels: Kernels,
    /// Added to the scores for the choice only, [experts].
    pub(super) bias: &'a [f32],
    pub(super) dims: &'a MoeConfig,
    /// Part of a row's weight at which the rest of its experts is dropped.
    pub(super) top_p: Option<f32>,
}

/// An expert of a row, and its weight.
type Pick = (u32, f32);

/// Choices of all rows of a step.
pub(super) struct Choices {
    /// [rows, top_k], best first, of which the row keeps `kept`.
    picks: Vec<Pick>,
    kept: Vec<usize>,
    top_k: usize,
    /// Experts that any row needs, ascending.
    needed: Vec<usize>,
    /// A place is one expert on one row; expert e has the places `first[e]..first[e + 1]`.
    first: Vec<u32>,
    /// Row of each place.
    rows: Vec<u32>,
    /// Place of each pick, [rows, top_k].
    places: Vec<u32>,
}

impl Choices {
    /// Room for `rows` rows.
    pub(super) fn new(rows: usize, dims: &MoeConfig) -> Self {
        let all = rows * dims.top_k;
        Self {
            picks: Vec::with_capacity(all),
            kept: Vec::with_capacity(rows),
            top_k: dims.top_k,
            needed: Vec::with_capacity(dims.experts),
            first: Vec::with_capacity(dims.experts + 2),
            rows: Vec::with_capacity(all),
            places: Vec::with_capacity(all),
        }
    }

    /// Bytes reserved.
    pub(super) fn bytes(&self) -> u64 {
        let Self { picks, kept, top_k: _, needed, first, rows, places } = self;
        let numbers = first.capacity() + rows.capacity() + places.capacity();
        let bytes = picks.capacity() * size_of::<Pick>()
            + (kept.capacity() + needed.capacity()) * size_of::<usize>()
            + numbers * size_of::<u32>();
        bytes as u64
    }

    /// Chooses for all rows; `scores: [rows, experts]` as the router gives them become
    /// their sigmoids.
    pub(super) fn choose(&mut self, rule: Rule<'_>, scores: &mut [f32]) {
        let (experts, rows) = (rule.dims.experts, scores.len() / rule.dims.experts);
        self.picks.resize(rows * self.top_k, (0, 0.0));
        self.kept.resize(rows, 0);
        let parts = (
            Chunks::new(scores, experts),
            Chunks::new(&mut self.picks, self.top_k),
            Chunks::new(&mut self.kept, 1),
        );
        for_each(parts, 1, |_, (scores, picks, kept)| {
            kept.into_slice()[0] = route(rule, scores.into_slice(), picks.into_slice());
        });
        self.sort_by_expert(experts);
    }

    /// Gives each pick its place, by expert and then by row: a counting sort.
    fn sort_by_expert(&mut self, experts: usize) {
        let Self { picks, kept, top_k, needed, first, rows, places } = self;
        let rows_of_picks = picks.chunks(*top_k).zip(&*kept);
        first.clear();
        first.resize(experts + 2, 0);
        for (picks, &kept) in rows_of_picks.clone() {
            picks[..kept].iter().for_each(|pick| first[pick.0 as usize + 2] += 1);
        }
        needed.clear();
        needed.extend((0..experts).filter(|e| first[e + 2] > 0));
        for e in 0..experts {
            first[e + 2] += first[e + 1];
        }
        // Now first[e + 1] is the first place of e; counted up, it becomes that of e + 1.
        rows.resize(first[experts + 1] as usize, 0);
        places.resize(picks.len(), 0);
        for (row, (picks, &kept)) in rows_of_picks.enumerate() {
            for (k, pick) in picks[..kept].iter().enumerate() {
                let next = &mut first[pick.0 as usize + 1];
                rows[*next as usize] = row as u32;
                places[row * *top_k + k] = *next;
                *next += 1;
            }
        }
    }

    /// Experts that any row needs, ascending.
    pub(super) fn needed(&self) -> &[usize] {
        &self.needed
    }

    /// Places of an expert.
    pub(super) fn places(&self, expert: usize) -> Range<usize> {
        self.first[expert] as usize..self.first[expert + 1] as usize
    }

    /// Rows of an expert, in the order of its places.
    pub(super) fn rows(&self, expert: usize) -> &[u32] {
        &self.rows[self.places(expert)]
    }

    /// Weighted sum of each row's experts in the order they were chosen.
    /// `sums: [rows, width]`, `outputs: [places, width]`.
    pub(super) fn sum(&self, kernels: Kernels, sums: &mut [f32], outputs: &[f32], width: usize) {
        let rows = self.kept.len();
        for_each((Chunks::new(sums, width), 0..rows), 1, |row, (sum, _)| {
            let (sum, first) = (sum.into_slice(), row * self.top_k);
            sum.fill(0.0);
            for pick in first..first + self.kept[row] {
                let output = &outputs[self.places[pick] as usize * width..][..width];
                kernels.add_scaled(sum, output, self.picks[pick].1);
            }
        });
    }
}

/// The choice for one row: the `top_k` largest of `sigmoid(score) + bias`, lowest id first
/// among equals, NaN never before a number; weights are the plain sigmoids, normalized.
/// Returns how many of `picks` are kept.
pub(super) fn route(rule: Rule<'_>, scores: &mut [f32], picks: &mut [Pick]) -> usize {
    rule.kernels.sigmoid(scores);
    let mut found = 0;
    for (expert, (score, bias)) in scores.iter().zip(rule.bias).enumerate() {
        let biased = score + bias;
        let biased = if biased.is_nan() { f32::NEG_INFINITY } else { biased };
        if found == picks.len() && biased <= picks[found - 1].1 {
            continue;
        }
        let at = picks[..found].partition_point(|pick| pick.1 >= biased);
        found = (found + 1).min(picks.len());
        picks[at..found].rotate_right(1);
        picks[at] = (expert as u32, biased);
    }
    picks.iter_mut().for_each(|pick| pick.1 = scores[pick.0 as usize]);
    let kept = rule.top_p.map_or(picks.len(), |top_p| keep(picks, top_p));
    let sum: f32 = picks[..kept].iter().map(|pick| pick.1).sum();
    let scaling = rule.dims.scaling;
    picks[..kept].iter_mut().for_each(|pick| pick.1 = pick.1 / (sum + 1e-20) * scaling);
    kept
}

/// Sorts by weight and counts how many it takes to reach `top_p` of the sum.
fn keep(picks: &mut [Pick], top_p: f32) -> usize {
    picks.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let enough = top_p * picks.iter().map(|pick| pick.1).sum::<f32>();
    let mut sum = 0.0;
    let reached = picks.iter().position(|pick| {
        sum += pick.1;
        sum >= enough
    });
    reached.map_or(picks.len(), |last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(experts: usize, top_k: usize) -> MoeConfig {
        MoeConfig { experts, top_k, latent: 32, inter: 32, shared_inter: 64, scaling: 1.0 }
    }

    fn choice(scores: &[f32], bias: &[f32], top_k: usize, top_p: Option<f32>) -> Vec<Pick> {
        let mut picks = vec![(0, 0.0); top_k];
        let dims = dims(scores.len(), top_k);
        let rule = Rule { kernels: Kernels::detect(), bias, dims: &dims, top_p };
        let kept = route(rule, &mut scores.to_vec(), &mut picks);
        picks.truncate(kept);
        picks
    }

    #[test]
    fn bias_chooses_but_does_not_weigh() {
        let chosen = choice(&[0.0, 2.0, 0.0], &[0.0, -2.0, 0.5], 2, None);
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [2, 0]);
        assert!(chosen.iter().all(|c| (c.1 - 0.5).abs() < 1e-6), "{chosen:?}");
    }

    #[test]
    fn ties_go_to_the_lowest_id_and_nan_to_the_last() {
        let chosen = choice(&[1.0, f32::NAN, 1.0, 1.0], &[0.0; 4], 2, None);
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(choice(&[f32::NAN; 3], &[0.0; 3], 3, None).len(), 3);
    }

    #[test]
    fn picks_are_the_largest_in_order() {
        let mut rng = fastrand::Rng::with_seed(4);
        for top_k in [1, 2, 7, 40] {
            let scores: Vec<_> = (0..40).map(|_| rng.f32() * 4.0 - 2.0).collect();
            let mut want: Vec<u32> = (0..40).collect();
            want.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
            let chosen = choice(&scores, &[0.0; 40], top_k, None);
            assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), want[..top_k]);
        }
    }

    #[test]
    fn top_p_drops_the_light_ones_and_weighs_the_rest_anew() {
        // Sigmoids 0.881, 0.5 and 0.119: 58.7, 33.3 and 8 %.
        let scores = [-2.0, 0.0, 2.0];
        let ids = |top_p| {
            let chosen = choice(&scores, &[3.0, 0.0, 0.0], 3, Some(top_p));
            let sum: f32 = chosen.iter().map(|c| c.1).sum();
            assert!((sum - 1.0).abs() < 1e-6, "{chosen:?}");
            chosen.iter().map(|c| c.0).collect::<Vec<_>>()
        };
        assert_eq!(ids(0.5), [2]);
        assert_eq!(ids(0.9), [2, 1]);
        assert_eq!(ids(0.95), [2, 1, 0]);
        assert_eq!(ids(1.0), [2, 1, 0]);
        assert_eq!(ids(1e-9), [2], "one always stays");
    }

    #[test]
    fn every_pick_has_a_place_of_its_own() {
        let (rows, dims) = (9, dims(11, 4));
        let mut rng = fastrand::Rng::with_seed(5);
        let mut scores: Vec<_> = (0..rows * dims.experts).map(|_| rng.f32() * 6.0 - 3.0).collect();
        let mut choices = Choices::new(rows, &dims);
        let bias = [0.0; 11];
        for top_p in [None, Some(0.7)] {
            let rule = Rule { kernels: Kernels::detect(), bias: &bias, dims: &dims, top_p };
            choices.choose(rule, &mut scores);
            let total: usize = choices.kept.iter().sum();
            assert_eq!(total, choices.rows.len());
            assert!((top_p.is_some()) == (total < rows * dims.top_k), "{total} kept");
            let mut seen = vec![false; total];
            for &expert in choices.needed() {
                for (place, &row) in choices.places(expert).zip(choices.rows(expert)) {
                    let row = row as usize;
                    let picks = row * dims.top_k..row * dims.top_k + choices.kept[row];
                    let pick = picks.into_iter().find(|&p| choices.places[p] as usize == place);
                    assert_eq!(choices.picks[pick.unwrap()].0 as usize, expert);
                    assert!(!std::mem::replace(&mut seen[place], true));
                }
            }
            assert!(seen.iter().all(|&s| s));
        }
    }
}
