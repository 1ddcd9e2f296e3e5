"""What only makers of predictors need: measured data, fitting, accuracy. Nothing that predicts imports it."""
