use super::*;

type Tiles = TileOwners<256, 256>;

fn matrix<const N: usize>(m: u32, n: u32, rank: i32) -> PeerMatrix<N> {
    PeerMatrix { team: Team { n_ranks: N as i32, rank, stride: 1 }, m, n }
}

/// Returns the first row and column of each part.
fn parts(m: u32, n: u32) -> impl Iterator<Item = (u32, u32)> {
    let columns = move |row| (0..n).step_by(64).map(move |column| (row, column));
    (0..m).step_by(16).flat_map(columns)
}

#[test]
fn slots_are_counted_for_whole_tiles() {
    assert_eq!(Everyone::slots(1, 8), Some(128));
    assert_eq!(RowOwners::slots(256, 256), Some(Tiles::SLOTS));
    assert_eq!(Everyone::slots(usize::MAX, 1 << 20), None);
    assert_eq!(Tiles::slots(1, 1, 4), Some(2 * Tiles::SLOTS));
    assert_eq!(Tiles::slots(257, 2049, 8), Some(4 * Tiles::SLOTS));
    assert_eq!(Tiles::slots(1 << 20, 1 << 20, 4), None);
}

/// The launch's slots are those that the host counts, and no two parts of an owner share one.
#[test]
fn every_part_of_an_owner_has_slots_of_its_own() {
    fn check<O: Owners, const N: usize>(m: u32, n: u32, slots: Option<u32>) {
        let matrix = matrix::<N>(m, n, 0);
        assert_eq!(slots, Some(O::used(&matrix)));
        let (mut places, mut counts) = (Vec::new(), [0; N]);
        for (row, column) in parts(m, n) {
            let PeerPlace { owner, slot, .. } = O::place(&matrix, row, column);
            assert!(slot + PART_SLOTS <= O::used(&matrix) && slot.is_multiple_of(PART_SLOTS));
            places.push((owner, slot));
            counts[owner as usize] += 1;
        }
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[0] != pair[1]), "{N} ranks");
        let (least, most) = (counts.iter().min(), counts.iter().max());
        assert!(O::ALL || 2 * least.unwrap() >= *most.unwrap(), "{counts:?}");
    }
    let (m, n) = (3 * 256, 11 * 256);
    let size = (m as usize, n as usize);
    check::<Tiles, 4>(m, n, Tiles::slots(size.0, size.1, 4));
    check::<Tiles, 8>(m, n, Tiles::slots(size.0, size.1, 8));
    check::<RowOwners, 2>(m, n, RowOwners::slots(size.0 / 2, size.1));
    check::<RowOwners, 8>(m, n, RowOwners::slots(size.0 / 8, size.1));
    check::<Everyone, 2>(m + 1, n + 8, Everyone::slots(size.0 + 1, size.1 + 8));
}

#[test]
fn parts_of_a_tile_lie_one_below_the_other() {
    fn check<O: Owners, const N: usize>() {
        let matrix = matrix::<N>(N as u32 * 256, 3 * 256 + 8, 1);
        for (row, column) in parts(matrix.m, matrix.n) {
            let (tile, in_tile) = (row / 128 * 128, row % 128);
            let first = O::place(&matrix, tile, column);
            let PeerPlace { owner, slot, .. } = O::place(&matrix, row, column);
            let below = in_tile / PART_ROWS * O::below(&matrix);
            assert_eq!((owner, slot), (first.owner, first.slot + below));
        }
    }
    check::<Everyone, 2>();
    check::<RowOwners, 2>();
    check::<RowOwners, 4>();
    check::<Tiles, 4>();
    check::<Tiles, 8>();
}
