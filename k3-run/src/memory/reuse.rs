//! How often an expert is in the cache when it is needed: an estimate, for `plan` only.

/// Part of a token's experts in a layer that the token before used too, as measured on
/// the release.
const NEXT_TOKEN_REUSE: f64 = 0.295;

/// Expected part of hits with `slots` experts cached in each layer, `top_k` of `experts`
/// being used: what the last token used comes back at the measured rate, and all else
/// is as likely to be there as the cache is large.
pub(super) fn hit_rate(slots: f64, top_k: usize, experts: usize) -> f64 {
    let (top_k, experts) = (top_k as f64, experts as f64);
    let recent = NEXT_TOKEN_REUSE * (slots / top_k).min(1.0);
    let share = (slots / experts).min(1.0);
    recent + (1.0 - recent) * share
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_cache_is_never_worse_and_all_experts_always_hit() {
        let rates: Vec<_> =
            [0, 1, 8, 16, 32, 448, 896].map(|n| hit_rate(f64::from(n), 16, 896)).into();
        assert_eq!((rates[0], rates[6]), (0.0, 1.0));
        assert!(rates.is_sorted(), "{rates:?}");
        assert!((0.29..0.33).contains(&rates[3]), "{rates:?}");
    }
}
