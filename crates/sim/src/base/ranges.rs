//! Ranges in maps, by their starts.

use litemap::LiteMap;

/// Returns the entry at `address`, or else the last one before it.
pub(crate) fn last_until<V>(map: &LiteMap<usize, V>, address: usize) -> Option<(&usize, &V)> {
    match map.find_index(&address) {
        Ok(at) => map.get_indexed(at),
        Err(next) => map.get_indexed(next.checked_sub(1)?),
    }
}
