use super::*;

#[test]
fn every_tile_has_one_number() {
    for (rows, columns) in [(1, 1), (2, 2), (16, 3), (17, 5), (40, 1), (1, 40)] {
        let order = TileOrder::<16> { rows, columns };
        let mut tiles: Vec<_> = (0..order.count()).map(|n| order.position(n)).collect();
        tiles.sort_unstable();
        let all = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        assert_eq!(tiles, all.collect::<Vec<_>>(), "{rows} x {columns}");
    }
}
