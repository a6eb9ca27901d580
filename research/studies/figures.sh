#!/usr/bin/env bash
# Draw the pictures of docs/gallery: `research/studies/figures.sh PAPER`, from the repository's root. PAPER is the folder of
# the paper's published files; runs/ holds our own runs (docs/paper.md).
set -euo pipefail
PAPER=$1

divdec results plot "$PAPER"/tofu/{baselines,dd_linear,dd_rank,gradient,eco,guard,lunar,offset,uld,whp} --variant dd-paper \
  --figure tofu-bars --output docs/gallery/tofu-bars.svg
divdec results plot "$PAPER"/muse --figure muse-scatter --output docs/gallery/muse-scatter.svg
divdec results plot "$PAPER"/{tofu,muse}/{baselines,dd_linear,dd_rank} --variant dd-paper --figure strength \
  --output docs/gallery/strength.svg
divdec results plot "$PAPER"/{tofu,muse}/{baselines,dd_linear,dd_rank} "$PAPER"/muse/dd_trigram --variant dd-paper --figure sizes \
  --output docs/gallery/sizes.svg
divdec results plot "$PAPER"/{tofu,muse}/{baselines,dd_linear,dd_rank} --variant dd-paper --figure over-under \
  --output docs/gallery/over-under.svg
divdec results plot "$PAPER"/tofu/leak_at_k --figure leak --output docs/gallery/leak.svg
divdec results plot "$PAPER"/tofu/distill/lr-*-epoch-10-* "$PAPER"/tofu/{gradient,whp,guard,eco,uld,offset,lunar} --figure distillation \
  --target "$PAPER"/tofu/baselines/target --retrain "$PAPER"/tofu/baselines/retrain --variant dd-paper --output docs/gallery/distillation-tofu.svg
divdec results plot "$PAPER"/muse/distill --figure distillation --target "$PAPER"/muse/baselines/target --retrain "$PAPER"/muse/baselines/retrain \
  --output docs/gallery/distillation-muse.svg
divdec results plot runs/compare-demo --figure tofu-bars --output docs/gallery/demo-bars.svg
divdec results plot runs/compare-demo --figure strength --output docs/gallery/demo-strength.svg
divdec results plot runs/compare-demo --figure leak --output docs/gallery/demo-leak.svg
divdec results plot runs/compare-muse --figure muse-scatter --output docs/gallery/muse-small.svg
cp runs/depth/depth.svg docs/gallery/depth.svg
cp runs/sequential-demo/distance.svg docs/gallery/sequential.svg
cp runs/sequential-muse/distance.svg docs/gallery/sequential-muse.svg
cp runs/bench-compute/compute.svg docs/gallery/compute.svg
