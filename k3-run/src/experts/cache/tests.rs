use std::collections::HashSet;

use super::*;
use crate::experts::duel::Duel;

fn cache(keys: usize, capacity: usize) -> Cache {
    Cache::new(keys, capacity, capacity + 4, 8.0)
}

fn touch(cache: &mut Cache, key: Key) -> bool {
    cache.replay([key].into_iter()) == 1
}

#[test]
fn least_used_then_oldest_goes_first() {
    let mut cache = cache(10, 3);
    for key in [0, 1, 2, 0, 2, 2] {
        touch(&mut cache, key);
    }
    touch(&mut cache, 3); // 1 was used once, and before it
    assert_eq!(cache.slot_of(1), None);
    touch(&mut cache, 4); // 3 was used once
    assert_eq!(cache.slot_of(3), None);
    assert!(cache.slot_of(0).is_some() && cache.slot_of(2).is_some());
}

#[test]
fn old_uses_fade() {
    let mut cache = cache(10, 2);
    (0..4).for_each(|_| {
        touch(&mut cache, 0);
    });
    touch(&mut cache, 1);
    touch(&mut cache, 2);
    assert!(cache.slot_of(0).is_some(), "four uses are worth more than one");
    (0..8 * 3).for_each(|_| cache.tick());
    touch(&mut cache, 1);
    touch(&mut cache, 2);
    assert_eq!(cache.slot_of(0), None, "after three half-lives half a use is left");
}

#[test]
fn worths_come_back_in_another_process() {
    let mut first = cache(10, 3);
    for key in [0, 1, 1, 1, 2, 0, 1] {
        touch(&mut first, key);
        first.tick();
    }
    let kept = first.worths();
    assert!(kept[1] > kept[0] && kept[0] > kept[2] && kept[2] > 0 && kept[3] == 0, "{kept:?}");
    let mut second = cache(10, 3);
    second.remember(&kept);
    assert_eq!(second.worths(), kept);
    // What was used much then stays for longer than what is used once now.
    for key in [1, 4, 5, 6, 7] {
        touch(&mut second, key);
    }
    assert!(second.slot_of(1).is_some());
    // Nonsense counts no more than the most there is, and fades.
    let mut third = cache(10, 3);
    third.remember(&[u16::MAX; 10]);
    let most = third.worths()[0];
    touch(&mut third, 0);
    assert_eq!(third.worths()[0], most);
    (0..100).for_each(|_| third.tick());
    assert!(third.worths()[0] < most && third.worths().iter().all(|&worth| worth > 0));
    (0..100).for_each(|_| third.tick());
    assert!(third.worths().iter().all(|&worth| worth == 0));
}

#[test]
fn what_is_worth_less_than_the_rest_does_not_stay() {
    let mut cache = cache(10, 1);
    touch(&mut cache, 0);
    touch(&mut cache, 0);
    touch(&mut cache, 1);
    assert!(cache.slot_of(0).is_some() && cache.slot_of(1).is_none());
    touch(&mut cache, 1);
    assert!(cache.slot_of(0).is_none() && cache.slot_of(1).is_some(), "the newer of equals");
}

#[test]
fn pinned_slots_are_never_taken() {
    let mut cache = Cache::new(10, 1, 3, 8.0);
    let taken: Vec<_> = (0..3).map(|key| cache.take(key).unwrap()).collect();
    assert_eq!(cache.take(3), None);
    assert!(!cache.unpin(taken[0]), "one may stay");
    assert!(cache.unpin(taken[1]), "two may not");
    assert_eq!(cache.slot_of(0), None);
    cache.forget(taken[2]);
    assert_eq!(cache.slot_of(2), None);
    assert_eq!(cache.use_key(1), Some(taken[1]));
    assert!(cache.take(4).is_some() && cache.take(5).is_some());
    assert_eq!(cache.take(6), None, "1 is in use");
}

#[test]
fn random_use_keeps_the_books() {
    let mut rng = fastrand::Rng::with_seed(1);
    for half_life in [0.01, 0.5, 8.0, 1000.0] {
        let mut cache = Cache::new(50, 7, 12, half_life);
        for step in 0..5_000 {
            let layer: HashSet<Key> = (0..5).map(|_| rng.u32(0..50).min(rng.u32(0..50))).collect();
            cache.replay(layer.iter().copied());
            let slots: HashSet<_> = (0..50).filter_map(|key| cache.slot_of(key)).collect();
            assert_eq!(slots.len() + cache.free.len(), 12);
            assert_eq!((slots.len(), cache.linked), (slots.len().min(7), slots.len()));
            let mut listed = 0;
            for (list, &(first, _)) in cache.lists.iter().enumerate() {
                assert_eq!(first != NONE, cache.occupied >> list & 1 == 1);
                let some = |slot: u32| (slot != NONE).then_some(slot);
                let next = |slot: &u32| some(cache.slots[*slot as usize].next);
                for slot in std::iter::successors(some(first), next) {
                    assert_eq!(cache.list_of(slot), list, "step {step}");
                    listed += 1;
                }
            }
            assert_eq!(listed, slots.len());
            (0..rng.u32(0..3)).for_each(|_| cache.tick());
            if rng.u32(0..100) == 0 {
                cache.set_half_life(rng.f32() * 20.0);
            }
        }
    }
}

/// A routing to replay: [token][layer][expert].
type Routing = Vec<Vec<Vec<Key>>>;

const LAYERS: usize = 6;
const EXPERTS: usize = 896;
const TOP_K: usize = 16;

/// How the experts of a token are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// All alike, but 29 % of the last token's come again, as measured on the release.
    Flat,
    /// By Zipf's law with exponent 0.8.
    Skewed,
    /// By Zipf's law, with other favourites every 80 tokens.
    Drifting,
}

/// Deterministic: the same on every machine.
fn routing(kind: Kind, tokens: usize) -> Routing {
    let mut rng = fastrand::Rng::with_seed(7);
    let exponent = match kind {
        Kind::Flat => 0.0,
        Kind::Skewed => 0.8,
        Kind::Drifting => 1.0,
    };
    let mut favourites: Vec<Vec<Key>> = vec![(0..EXPERTS as Key).collect(); LAYERS];
    let weights = (1..=EXPERTS).scan(0.0, |sum, rank| {
        *sum += (rank as f64).powf(-exponent);
        Some(*sum)
    });
    let cumulative: Vec<f64> = weights.collect();
    let mut last = vec![Vec::new(); LAYERS];
    (0..tokens)
        .map(|token| {
            if token == 0 || kind == Kind::Drifting && token % 80 == 0 {
                favourites.iter_mut().for_each(|f| rng.shuffle(f));
            }
            for (layer, chosen) in last.iter_mut().enumerate() {
                chosen.retain(|_| kind == Kind::Flat && rng.f64() < 0.28);
                while chosen.len() < TOP_K {
                    let at = rng.f64() * cumulative[EXPERTS - 1];
                    let rank = cumulative.partition_point(|&c| c <= at).min(EXPERTS - 1);
                    let key = (layer * EXPERTS) as Key + favourites[layer][rank];
                    if !chosen.contains(&key) {
                        chosen.push(key);
                    }
                }
            }
            last.clone()
        })
        .collect()
}

/// Part of the uses that hit, after the first fifth of the tokens.
fn replay(routing: &Routing, mut layer: impl FnMut(&[Key], bool) -> usize) -> f64 {
    let (mut hits, mut uses) = (0, 0);
    for (token, layers) in routing.iter().enumerate() {
        for (i, keys) in layers.iter().enumerate() {
            let hit = layer(keys, i == 0);
            if token >= routing.len() / 5 {
                hits += hit;
                uses += keys.len();
            }
        }
    }
    f64::from(hits as u32) / f64::from(uses as u32)
}

fn ours(routing: &Routing, capacity: usize) -> f64 {
    let keys = LAYERS * EXPERTS;
    let mut duel = Duel::new(keys, capacity, LAYERS * TOP_K);
    let mut cache = Cache::new(keys, capacity, capacity + TOP_K, duel.half_life());
    replay(routing, |layer, first| {
        if first {
            if let Some(half_life) = duel.tick() {
                cache.set_half_life(half_life);
            }
            cache.tick();
        }
        duel.replay(layer.iter().copied());
        cache.replay(layer.iter().copied())
    })
}

fn lru(routing: &Routing, capacity: usize) -> f64 {
    let mut kept: std::collections::VecDeque<Key> = std::collections::VecDeque::new();
    replay(routing, |layer, _| {
        let before = kept.clone();
        kept.retain(|key| !layer.contains(key));
        kept.extend(layer);
        kept.drain(..kept.len().saturating_sub(capacity));
        layer.iter().filter(|key| before.contains(key)).count()
    })
}

#[test]
#[expect(clippy::print_stdout, reason = "the table in BENCHMARKS.md")]
fn replayed_routing_hits_at_least_as_often_as_lru() {
    let per_token = LAYERS * TOP_K;
    for kind in [Kind::Flat, Kind::Skewed, Kind::Drifting] {
        let routing = routing(kind, 400);
        for percent in [12, 25, 50, 75, 95, 100, 110, 125, 150, 200, 300, 600, 1200, 2400] {
            let capacity = per_token * percent / 100;
            let (ours, lru) = (ours(&routing, capacity), lru(&routing, capacity));
            println!("{kind:?} {percent:>5} % of a token: {ours:.4}, LRU {lru:.4}");
            // Half a point less is what trying the other half-lives may cost.
            assert!(ours >= lru - 0.005, "{kind:?} {percent} %: {ours:.4}, LRU {lru:.4}");
            assert!(ours > 0.01, "{kind:?} {percent} %: {ours:.4}");
        }
    }
}
