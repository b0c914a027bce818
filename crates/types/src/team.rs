//! Teams: strided sets of ranks, and the translation of ranks between them.
//!
//! Every function computes with the fields alone, with the same result on the host and in a kernel.
//! None panics: a division by a stride or size of 0, which NCCL leaves undefined, has a defined
//! result.

/// A set of ranks: member `i` is the world rank `my_world_rank + (i - rank) * stride`.
///
/// A value describes a team relative to one rank, which need not be a member. Functions of two
/// teams need both relative to the same rank.
///
/// ```
/// use devcomm_types::Team;
/// // Rank 5 of 8, in LSA teams of 4.
/// let world = Team { n_ranks: 8, rank: 5, stride: 1 };
/// let lsa = world.inner_factor(4);
/// let rail = world.outer_factor(4);
/// assert_eq!((lsa.to_world(5, 0), rail.to_world(5, 0)), (4, 1));
/// assert!(world.contains(rail, 0) && !lsa.contains(rail, 0));
/// assert_eq!(world.rank_in(lsa, 3), 7);
/// ```
///
/// NCCL: `ncclTeam` (12 bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[doc(alias = "ncclTeam")]
pub struct Team {
    /// The number of members.
    pub n_ranks: i32,
    /// This rank's index in the team; `0..n_ranks` for a member.
    pub rank: i32,
    /// Distance in world ranks between consecutive members.
    pub stride: i32,
}

impl Team {
    /// Returns the world rank of member `member`, for a team of the rank with world rank
    /// `my_world_rank`.
    ///
    /// NCCL: `ncclTeamRankToWorld`.
    #[doc(alias = "ncclTeamRankToWorld")]
    #[must_use]
    pub const fn to_world(self, my_world_rank: i32, member: i32) -> i32 {
        my_world_rank.wrapping_add(self.distance_to(member))
    }

    /// Returns the LSA rank of member `member`, for a team of the rank with LSA rank `my_lsa_rank`.
    /// It is outside of `0..lsa_size` for a member that load and store do not reach.
    ///
    /// NCCL: `ncclTeamRankToLsa`.
    #[doc(alias = "ncclTeamRankToLsa")]
    #[must_use]
    pub const fn to_lsa(self, my_lsa_rank: i32, member: i32) -> i32 {
        my_lsa_rank.wrapping_add(self.distance_to(member))
    }

    /// Returns whether member `member` of `other` is also a member of this team.
    ///
    /// NCCL: `ncclTeamRankIsMember(self, other, member)`.
    #[doc(alias = "ncclTeamRankIsMember")]
    #[must_use]
    pub const fn contains(self, other: Team, member: i32) -> bool {
        let distance = other.distance_to(member);
        let rank = self.rank_in(other, member);
        remainder(distance, self.stride) == 0 && 0 <= rank && rank < self.n_ranks
    }

    /// Returns the index in this team of member `member` of `other`; meaningless unless this team
    /// [`contains`](Self::contains) that member.
    ///
    /// NCCL: `ncclTeamRankToTeam(self, other, member)`.
    #[doc(alias = "ncclTeamRankToTeam")]
    #[must_use]
    pub const fn rank_in(self, other: Team, member: i32) -> i32 {
        self.rank.wrapping_add(quotient(other.distance_to(member), self.stride))
    }

    /// Returns the rank `steps` (`0..=n_ranks`) after this one, cyclically: of 4 ranks, rank 3 gets
    /// 3, 0, 1 for 0, 1, 2 steps.
    ///
    /// Ranks that all iterate like this access different peers at the same step.
    #[must_use]
    pub const fn rotated(self, steps: i32) -> i32 {
        let rank = self.rank.wrapping_add(steps);
        if rank < self.n_ranks { rank } else { rank.wrapping_sub(self.n_ranks) }
    }

    /// Returns the next rank, cyclically: the first follows the last; this rank in a team of one.
    #[must_use]
    pub const fn next(self) -> i32 {
        self.rotated(1)
    }

    /// Returns the previous rank, cyclically.
    #[must_use]
    pub const fn prev(self) -> i32 {
        self.rotated(self.n_ranks.wrapping_sub(1))
    }

    /// Returns all ranks but this one, cyclically: the next one first, the previous one last.
    ///
    /// ```
    /// # use devcomm_types::Team;
    /// let team = Team { n_ranks: 4, rank: 2, stride: 1 };
    /// assert!(team.others().eq([3, 0, 1]));
    /// assert!(team.all_from_self().eq([2, 3, 0, 1]));
    /// ```
    pub const fn others(self) -> Ranks {
        Ranks { team: self, last: 0 }
    }

    /// Returns all ranks, cyclically, this one first.
    pub const fn all_from_self(self) -> Ranks {
        Ranks { team: self, last: -1 }
    }

    /// Splits the team into groups of `inner_size` consecutive members, where `inner_size` divides
    /// `n_ranks`; returns this rank's group.
    ///
    /// NCCL: `ncclTeamInnerFactor`.
    #[doc(alias = "ncclTeamInnerFactor")]
    #[must_use]
    pub const fn inner_factor(self, inner_size: i32) -> Team {
        Team { n_ranks: inner_size, rank: remainder(self.rank, inner_size), stride: self.stride }
    }

    /// Splits the team as [`inner_factor`](Self::inner_factor) does; returns the members with this
    /// rank's index in their group. An `inner_size` of 0 gives an empty team.
    ///
    /// NCCL: `ncclTeamOuterFactor`.
    #[doc(alias = "ncclTeamOuterFactor")]
    #[must_use]
    pub const fn outer_factor(self, inner_size: i32) -> Team {
        Team {
            n_ranks: quotient(self.n_ranks, inner_size),
            rank: quotient(self.rank, inner_size),
            stride: self.stride.wrapping_mul(inner_size),
        }
    }

    /// Returns the rank in this team of the `index`-th member that is not in `subset`, a team
    /// within this one; `index` is less than `self.n_ranks - subset.n_ranks`.
    ///
    /// NCCL: `ncclTeamRankInDifference(self, subset, index)`.
    #[doc(alias = "ncclTeamRankInDifference")]
    #[must_use]
    pub const fn rank_in_difference(self, subset: Team, index: i32) -> i32 {
        // Ranks of the subset in this team: from `first` to `first + extent`, `step` apart.
        let step = quotient(subset.stride, self.stride);
        let start = self.rank.wrapping_sub(subset.rank.wrapping_mul(step));
        let extent = subset.n_ranks.wrapping_sub(1).wrapping_mul(step);
        let (first, step, extent) = if step < 0 {
            (start.wrapping_add(extent), step.wrapping_neg(), extent.wrapping_neg())
        } else {
            (start, step, extent)
        };
        let past = index.wrapping_sub(first);
        // The members between two consecutive members of the subset: in one gap, in all gaps.
        let gap = step.wrapping_sub(1);
        let between = subset.n_ranks.wrapping_sub(1).wrapping_mul(gap);
        // The member is before the subset, in one of its gaps, or after it.
        if past < 0 {
            index
        } else if past < between {
            let gaps = quotient(past, gap).wrapping_mul(step);
            first.wrapping_add(1).wrapping_add(gaps).wrapping_add(remainder(past, gap))
        } else {
            first.wrapping_add(1).wrapping_add(extent).wrapping_add(past.wrapping_sub(between))
        }
    }

    /// Returns the world rank of `member` minus this rank's.
    const fn distance_to(self, member: i32) -> i32 {
        member.wrapping_sub(self.rank).wrapping_mul(self.stride)
    }
}

/// Iterator over ranks in cyclic order: [`Team::others`], [`Team::all_from_self`].
#[derive(Clone, Copy, Debug)]
#[must_use = "an iterator does nothing until it is iterated"]
pub struct Ranks {
    team: Team,
    /// Steps from this rank to the rank returned last.
    last: i32,
}

impl Iterator for Ranks {
    type Item = i32;

    fn next(&mut self) -> Option<i32> {
        self.last = self.last.wrapping_add(1);
        (self.last < self.team.n_ranks).then(|| self.team.rotated(self.last))
    }
}

/// Returns `a / b` as in C; 0 where `b` is 0. Written so that a kernel has no panic for a division
/// by 0.
const fn quotient(a: i32, b: i32) -> i32 {
    if b == 0 { 0 } else { a.wrapping_div(b) }
}

/// Returns `a % b` as in C; `a` where `b` is 0.
const fn remainder(a: i32, b: i32) -> i32 {
    if b == 0 { a } else { a.wrapping_rem(b) }
}

const _: () = assert!(size_of::<Team>() == 12);

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    /// Returns the world ranks of a team, in the team's order.
    fn members(team: Team, me: i32) -> Vec<i32> {
        (0..team.n_ranks).map(|member| team.to_world(me, member)).collect()
    }

    /// Calls `check` for every rank of every world of up to 24 ranks in equal LSA teams, with the
    /// rank's teams: world, LSA, rail, inner and outer factors of LSA and rail, reversed rail.
    fn for_each_rank(mut check: impl FnMut(i32, &[Team])) {
        for n_ranks in 1..=24 {
            for lsa_size in (1..=n_ranks).filter(|size| n_ranks % size == 0) {
                for me in 0..n_ranks {
                    let world = Team { n_ranks, rank: me, stride: 1 };
                    let (lsa, rail) = (world.inner_factor(lsa_size), world.outer_factor(lsa_size));
                    let mut teams = Vec::from([world, lsa, rail]);
                    for parent in [lsa, rail] {
                        for inner in (1..=parent.n_ranks).filter(|i| parent.n_ranks % i == 0) {
                            teams.extend([parent.inner_factor(inner), parent.outer_factor(inner)]);
                        }
                    }
                    // The rail team in reverse order.
                    teams.push(Team {
                        rank: rail.n_ranks - 1 - rail.rank,
                        stride: -rail.stride,
                        ..rail
                    });
                    check(me, &teams);
                }
            }
        }
    }

    #[test]
    fn factors_cut_the_world_into_runs_and_rails() {
        for_each_rank(|me, teams| {
            let (world, lsa, rail) = (teams[0], teams[1], teams[2]);
            let n = lsa.n_ranks;
            assert_eq!(members(world, me), (0..world.n_ranks).collect::<Vec<_>>());
            assert_eq!(members(lsa, me), (me / n * n..me / n * n + n).collect::<Vec<_>>());
            let same_index = (0..world.n_ranks).filter(|rank| rank % n == me % n);
            assert_eq!(members(rail, me), same_index.collect::<Vec<_>>());
        });
    }

    #[test]
    fn membership_and_translation_are_those_of_the_sets_of_ranks() {
        for_each_rank(|me, teams| {
            for &a in teams {
                let of_a = members(a, me);
                assert_eq!(of_a[a.rank as usize], me);
                for &b in teams {
                    for (index, rank) in members(b, me).into_iter().enumerate() {
                        let found = of_a.iter().position(|&other| other == rank);
                        assert_eq!(
                            a.contains(b, index as i32),
                            found.is_some(),
                            "{a:?} {b:?} {index}"
                        );
                        if let Some(found) = found {
                            assert_eq!(a.rank_in(b, index as i32), found as i32);
                        }
                    }
                    assert!(!a.contains(a, -1) && !a.contains(a, a.n_ranks));
                }
            }
        });
    }

    #[test]
    fn the_difference_lists_the_members_that_the_subset_lacks_in_order() {
        for_each_rank(|me, teams| {
            for &parent in teams {
                for &subset in teams {
                    let within = (0..subset.n_ranks).all(|member| parent.contains(subset, member));
                    if !within {
                        continue;
                    }
                    let of_subset = members(subset, me);
                    let rest = members(parent, me)
                        .into_iter()
                        .enumerate()
                        .filter(|(_, rank)| !of_subset.contains(rank));
                    for (index, (rank, _)) in rest.enumerate() {
                        let got = parent.rank_in_difference(subset, index as i32);
                        assert_eq!(got, rank as i32, "{parent:?} without {subset:?}, {index}");
                    }
                }
            }
        });
    }

    #[test]
    fn ranks_go_round_the_team_from_this_one() {
        for_each_rank(|_, teams| {
            for &team in teams {
                let from_self = (0..team.n_ranks).map(|i| (team.rank + i) % team.n_ranks);
                let ranks: Vec<_> = from_self.collect();
                assert!(team.all_from_self().eq(ranks.iter().copied()));
                assert!(team.others().eq(ranks[1..].iter().copied()));
                assert_eq!(team.next(), ranks[1 % ranks.len()]);
                assert_eq!(team.prev(), *ranks.last().unwrap());
                assert_eq!(team.rotated(team.n_ranks), team.rank);
            }
        });
    }

    #[test]
    fn an_lsa_rank_outside_the_lsa_team_is_out_of_its_range() {
        let world = Team { n_ranks: 8, rank: 5, stride: 1 };
        let lsa_ranks: Vec<_> = (0..8).map(|rank| world.to_lsa(1, rank)).collect();
        assert_eq!(lsa_ranks, [-4, -3, -2, -1, 0, 1, 2, 3]);
    }

    #[test]
    fn no_team_makes_a_function_panic() {
        let extremes = [i32::MIN, -1, 0, 1, 2, i32::MAX];
        let teams: Vec<Team> = extremes
            .iter()
            .flat_map(|&n_ranks| extremes.iter().map(move |&rank| (n_ranks, rank)))
            .flat_map(|(n_ranks, rank)| {
                extremes.iter().map(move |&stride| Team { n_ranks, rank, stride })
            })
            .collect();
        let mut contained = 0;
        for &a in &teams {
            for &b in &teams {
                for &member in &extremes {
                    contained += usize::from(a.contains(b, member));
                    let _ = (a.rank_in(b, member), a.rank_in_difference(b, member));
                    let _ = (a.next(), a.prev(), a.rotated(member), a.others().next());
                    let _ = (
                        a.inner_factor(member),
                        a.outer_factor(member),
                        a.to_world(member, member),
                    );
                }
            }
        }
        assert!(contained > 0);
        // With stride 0 all members are this rank.
        let point = Team { n_ranks: 4, rank: 0, stride: 0 };
        assert!(point.contains(Team { n_ranks: 1, rank: 0, stride: 1 }, 0));
        assert!(!point.contains(Team { n_ranks: 2, rank: 0, stride: 1 }, 1));
    }
}
