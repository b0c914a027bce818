//! Sets of ranks that exchange: the world, its subsets, and subsets of those.
//!
//! Many subsets exchange at the same time over the same connections, so every contribution to an
//! exchange contains the key of its subset. Ranks compute equal keys without communication. A key
//! describes how the subset was made, starting at the world: for every step, the members, and the
//! number of earlier subsets of the same parent with the same members. So two subsets with the same
//! members have different keys. This needs only the usual rule of collective calls: the members
//! make their subsets in the same order.

use std::collections::{HashMap, HashSet};
use std::io;

use parking_lot::Mutex;

use super::wire::{MAX_KEY, bad};
use crate::error::{Error, Result};

/// Ranks of the world, in the order of their ranks in the subset.
#[derive(Debug, PartialEq)]
pub(crate) struct Subset {
    /// A path of steps from the world to this subset, for each the number of earlier equal subsets,
    /// the number of members, the members as ranks of the world.
    key: Vec<u64>,
    members: Vec<usize>,
}

impl Subset {
    pub(super) fn world(n_ranks: usize) -> Self {
        Self { key: Vec::new(), members: (0..n_ranks).collect() }
    }

    pub(super) fn key(&self) -> &[u64] {
        &self.key
    }

    /// Returns the members as ranks of the world.
    pub(super) fn members(&self) -> &[usize] {
        &self.members
    }

    /// Returns the rank in the subset of a rank of the world.
    pub(super) fn rank_of(&self, world_rank: usize) -> Option<usize> {
        // Fast path: the subset starts with ranks 0, 1, ..., or is the world.
        if self.members.get(world_rank) == Some(&world_rank) {
            return Some(world_rank);
        }
        self.members.iter().position(|&member| member == world_rank)
    }

    /// Returns the subset with this key, which another rank has sent.
    pub(super) fn from_key(key: Vec<u64>, n_ranks: usize) -> io::Result<Self> {
        let (mut rest, mut last) = (key.as_slice(), None);
        while let [_, count, after @ ..] = rest {
            let count = usize::try_from(*count).ok().filter(|count| *count <= after.len());
            let (members, after) = after.split_at(count.ok_or_else(invalid)?);
            (rest, last) = (after, Some(members));
        }
        if !rest.is_empty() {
            return Err(invalid());
        }
        let Some(members) = last else { return Ok(Self::world(n_ranks)) };
        // `fault` refuses the largest number, as it does every one from `n_ranks` on.
        let members = members.iter().map(|&member| usize::try_from(member).unwrap_or(usize::MAX));
        let members: Vec<usize> = members.collect();
        match fault(&members, n_ranks) {
            None if !members.is_empty() => Ok(Self { key, members }),
            _ => Err(invalid()),
        }
    }
}

fn invalid() -> io::Error {
    bad("an invalid subset")
}

/// Returns why these ranks, of `n_ranks`, are not valid members, if so.
fn fault(members: &[usize], n_ranks: usize) -> Option<String> {
    let mut seen = HashSet::with_capacity(members.len().min(n_ranks));
    members.iter().find_map(|&member| {
        if member >= n_ranks {
            Some(format!("rank {member} is not one of {n_ranks} ranks"))
        } else if seen.insert(member) {
            None
        } else {
            Some(format!("rank {member} is listed twice"))
        }
    })
}

/// The number of subsets that one rank has made of one parent, by members.
#[derive(Default)]
pub(super) struct SubsetIds(Mutex<HashMap<Vec<usize>, u64>>);

impl SubsetIds {
    /// Returns a new subset of `subset` with these of its ranks; `rank` is this rank's number in
    /// `subset`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`].
    pub(super) fn next(&self, subset: &Subset, rank: usize, members: &[usize]) -> Result<Subset> {
        let n_ranks = subset.members.len();
        if let Some(fault) = fault(members, n_ranks) {
            return Err(Error::invalid(format!("these ranks cannot form a subset: {fault}")));
        }
        if !members.contains(&rank) {
            return Err(Error::invalid(format!("rank {rank} is not in the subset that it makes")));
        }
        let length = size_of::<u64>() * (subset.key.len() + 2 + members.len());
        if length > MAX_KEY {
            return Err(Error::invalid("subsets are nested too deep"));
        }
        let nth = {
            let mut made = self.0.lock();
            let made = made.entry(members.to_vec()).or_default();
            *made += 1;
            *made - 1
        };
        let members: Vec<usize> = members.iter().map(|&member| subset.members[member]).collect();
        let mut key = subset.key.clone();
        key.extend([nth, members.len() as u64]);
        key.extend(members.iter().map(|&member| member as u64));
        Ok(Subset { key, members })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subsets_of_equal_origin_share_a_key_and_all_others_differ() {
        let world = Subset::world(6);
        let (one, other) = (SubsetIds::default(), SubsetIds::default());
        let made = |subsets: &SubsetIds, rank| {
            [&[0, 2, 4][..], &[4, 2, 0], &[0, 2, 4], &[2, 4]]
                .map(|members| subsets.next(&world, rank, members).unwrap())
        };
        let (ones, others) = (made(&one, 2), made(&other, 4));
        assert_eq!(ones, others);
        let keys: HashSet<_> = ones.iter().map(Subset::key).collect();
        assert_eq!(keys.len(), 4);
        // The same ranks of the world, as a subset of a subset.
        let nested = SubsetIds::default().next(&ones[0], 1, &[1, 2]).unwrap();
        assert_eq!(nested.members(), ones[3].members());
        assert!(!keys.contains(nested.key()));
        assert_eq!(nested.rank_of(4), Some(1));
        assert_eq!(nested.rank_of(0), None);
    }

    #[test]
    fn a_subset_is_read_back_from_its_key() {
        let world = Subset::world(5);
        let subset = SubsetIds::default().next(&world, 3, &[4, 3, 1]).unwrap();
        let nested = SubsetIds::default().next(&subset, 0, &[0, 2]).unwrap();
        for subset in [world, subset, nested] {
            assert_eq!(Subset::from_key(subset.key.clone(), 5).unwrap(), subset);
        }
    }

    #[test]
    fn an_invalid_key_is_refused() {
        for key in [
            &[0][..],
            &[0, 0],
            &[0, 2, 1],
            &[0, 2, 1, 1],
            &[0, 2, 1, 5],
            &[0, u64::MAX, 1],
            &[0, 1, u64::MAX],
            &[0, 1, 1, 7],
        ] {
            assert!(Subset::from_key(key.to_vec(), 5).is_err(), "{key:?}");
        }
    }

    #[test]
    fn an_impossible_subset_is_an_error() {
        let world = Subset::world(4);
        let why = |members: &[usize]| {
            SubsetIds::default().next(&world, 1, members).unwrap_err().to_string()
        };
        assert!(why(&[1, 4]).contains("rank 4 is not one of 4 ranks"));
        assert!(why(&[1, 2, 1]).contains("rank 1 is listed twice"));
        assert!(why(&[0, 2]).contains("rank 1 is not in the subset"));
        assert!(why(&[]).contains("rank 1 is not in the subset"));
    }
}
