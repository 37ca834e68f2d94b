//! Caches of ready plans: a known problem costs a lookup.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use qgemm_hal::{Catalog, Device, Families, Family, LaunchSequence, Operation, with_operations};
use qgemm_sched::Preferences;

use crate::error::Error;
use crate::gemm::LayerPlans;
use crate::planned::Chosen;

/// Maximum entries of a cache. An engine has tens of shapes for
/// each of a few numbers of tokens.
pub(crate) const MOST_ENTRIES: usize = 1024;

/// Launch sequence of one operation, with its config.
pub(crate) struct Ready<O: Operation> {
    pub family: &'static dyn Family<O>,
    pub plan: O::Plan,
    pub sequence: LaunchSequence,
}

impl<O: Chosen> Ready<O> {
    /// Ready launches of `plan` from `family`.
    pub fn prepare(device: &dyn Device, op: &O, family: &'static dyn Family<O>, plan: O::Plan) -> Result<Self, Error> {
        let sequence = op.prepare(device, family, &plan)?;
        let sequence = match O::math(&plan) {
            Some(math) => sequence.with_math(math),
            None => sequence,
        };
        Ok(Self { family, plan, sequence })
    }
}

impl<O: Operation> fmt::Debug for Ready<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ready").field("plan", &self.plan).field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

/// Ready launches, by operation and preferences.
type CacheOf<O> = PlanCache<(O, Preferences), Ready<O>>;

/// Operation with a cache of its plans.
pub(crate) trait Cached: Operation + Eq + Hash {
    /// Kernel families of the operation.
    fn families(catalog: &Catalog) -> Families<Self>;

    /// Plan cache of the operation.
    fn cache(caches: &PlanCaches) -> &PlanCache<(Self, Preferences), Ready<Self>>;
}

macro_rules! caches {
    ($($name:ident: $op:ident($($part:ident),*) [$($text:literal $spec:ident($keys:ident)),*] $summary:literal,)*) => {
        /// Plan caches of a context, one per operation. Keys include a
        /// plan's preferences, but not the context's settings.
        #[derive(Debug, Default)]
        pub(crate) struct PlanCaches {
            $($name: CacheOf<qgemm_hal::$op>,)*
            /// Plans of layers.
            pub layers: LayerPlans,
        }

        $(impl Cached for qgemm_hal::$op {
            fn families(catalog: &Catalog) -> Families<Self> {
                catalog.$name
            }

            fn cache(caches: &PlanCaches) -> &CacheOf<Self> {
                &caches.$name
            }
        })*
    };
}
with_operations!(caches);

/// LRU cache of at most [`MOST_ENTRIES`] values.
#[derive(Debug)]
pub(crate) struct PlanCache<K, V> {
    entries: RwLock<HashMap<K, Entry<V>>>,
    /// Count of lookups.
    clock: AtomicU64,
}

#[derive(Debug)]
struct Entry<V> {
    value: Arc<V>,
    /// Clock at the last lookup.
    used: AtomicU64,
}

impl<K, V> Default for PlanCache<K, V> {
    fn default() -> Self {
        Self { entries: RwLock::default(), clock: AtomicU64::new(0) }
    }
}

impl<K: Clone + Eq + Hash, V> PlanCache<K, V> {
    /// Value of `key`; `make` makes an unknown one. Meanwhile no lock
    /// is held, and kernels compile concurrently. If two threads make
    /// one value, both get the first result.
    ///
    /// # Errors
    /// Errors of `make`; nothing is cached then.
    pub fn get_or_make<E>(&self, key: &K, make: impl FnOnce() -> Result<V, E>) -> Result<Arc<V>, E> {
        if let Some(known) = self.get(key) {
            return Ok(known);
        }
        Ok(self.insert(key, Arc::new(make()?)))
    }

    fn get(&self, key: &K) -> Option<Arc<V>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.get(key)?;
        entry.used.store(self.tick(), Ordering::Relaxed);
        Some(Arc::clone(&entry.value))
    }

    /// Inserts `value` unless the key is present. Returns the cached
    /// value.
    fn insert(&self, key: &K, value: Arc<V>) -> Arc<V> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.get(key) {
            return Arc::clone(&entry.value);
        }
        let oldest = match entries.len() {
            MOST_ENTRIES.. => entries.iter().min_by_key(|(_, entry)| entry.used.load(Ordering::Relaxed)),
            _ => None,
        };
        let oldest = oldest.map(|(key, _)| key.clone());
        let evicted = oldest.and_then(|oldest| entries.remove(&oldest));
        let used = AtomicU64::new(self.tick());
        entries.insert(key.clone(), Entry { value: Arc::clone(&value), used });
        // Unlock first: dropping the last reference to a sequence may
        // free device memory.
        drop(entries);
        drop(evicted);
        value
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn get(cache: &PlanCache<usize, usize>, key: usize) -> Arc<usize> {
        let Ok(value) = cache.get_or_make(&key, || Ok::<_, Infallible>(key * 10));
        value
    }

    #[test]
    fn what_is_known_is_the_same() {
        let cache = PlanCache::default();
        let first = get(&cache, 3);
        assert!(*first == 30 && Arc::ptr_eq(&first, &get(&cache, 3)));
        let failed = cache.get_or_make(&4, || Err("no kernel"));
        assert_eq!((failed, *get(&cache, 4)), (Err("no kernel"), 40));
    }

    #[test]
    fn two_that_make_the_same_get_the_first() {
        let cache = PlanCache::default();
        // One `make` within another: no lock is held.
        let Ok(mine) = cache.get_or_make(&1, || Ok::<_, Infallible>(*get(&cache, 1) + 1));
        assert_eq!((*mine, *get(&cache, 1)), (10, 10));
    }

    #[test]
    fn the_longest_unused_goes_first() {
        let cache = PlanCache::default();
        let first = get(&cache, 0);
        for key in 1..MOST_ENTRIES {
            get(&cache, key);
        }
        get(&cache, 0);
        for key in MOST_ENTRIES..MOST_ENTRIES + 10 {
            get(&cache, key);
        }
        let is_known = |key| cache.entries.read().expect("not poisoned").contains_key(&key);
        assert_eq!(cache.entries.read().expect("not poisoned").len(), MOST_ENTRIES);
        assert!(Arc::ptr_eq(&first, &get(&cache, 0)) && !is_known(1) && !is_known(10) && is_known(11));
    }
}
