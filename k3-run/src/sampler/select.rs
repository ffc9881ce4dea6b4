//! The tokens that may be drawn, without sorting the vocabulary.
//!
//! The order is total (logit downwards, then id upwards), so the result does not depend
//! on how a selection algorithm treats equals.

use std::cmp::Ordering;

use super::params::SamplingParams;

/// Tokens sorted at first; the nucleus of a confident model is far smaller.
const FIRST_BLOCK: usize = 64;

fn order(logits: &[f32]) -> impl Fn(&u32, &u32) -> Ordering {
    |&a, &b| {
        let (la, lb) = (logits[a as usize], logits[b as usize]);
        lb.partial_cmp(&la).unwrap_or(Ordering::Equal).then(a.cmp(&b))
    }
}

/// Fills `ids` with the `k` best tokens in order.
pub(super) fn best_of_all(k: usize, logits: &[f32], ids: &mut Vec<u32>) {
    ids.clear();
    ids.extend(0..logits.len() as u32);
    if k < ids.len() {
        ids.select_nth_unstable_by(k, order(logits));
        ids.truncate(k);
    }
    ids.sort_unstable_by(order(logits));
}

/// Fills `ids` with the tokens that top-k, top-p and min-p leave, in order.
pub(super) fn candidates(
    params: &SamplingParams,
    logits: &[f32],
    weights: &[f64],
    ids: &mut Vec<u32>,
) {
    let weight = |id: u32| weights[id as usize];
    let total: f64;
    if params.top_k > 0 {
        best_of_all(params.top_k, logits, ids);
        total = ids.iter().map(|&id| weight(id)).sum();
    } else {
        total = weights.iter().sum();
        // All tokens below this weight together have less than half of what top-p leaves
        // out, so none of them is in the nucleus.
        let floor = (1.0 - params.top_p) * total / (2 * weights.len()) as f64;
        ids.clear();
        ids.extend((0..weights.len() as u32).filter(|&id| weight(id) >= floor));
    }
    nucleus(params.top_p * total, logits, weights, ids);
    ids.truncate(ids.partition_point(|&id| weight(id) >= params.min_p));
}

/// Cuts `ids` down to its best tokens that together weigh `target`, in order: at least one.
fn nucleus(target: f64, logits: &[f32], weights: &[f64], ids: &mut Vec<u32>) {
    let (mut sum, mut done, mut block) = (0.0, 0, FIRST_BLOCK);
    while done < ids.len() {
        let end = ids.len().min(done + block);
        if end < ids.len() {
            ids[done..].select_nth_unstable_by(end - done, order(logits));
        }
        ids[done..end].sort_unstable_by(order(logits));
        for at in done..end {
            sum += weights[ids[at] as usize];
            if sum >= target {
                ids.truncate(at + 1);
                return;
            }
        }
        (done, block) = (end, block * 4);
    }
}
